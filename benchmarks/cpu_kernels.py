"""The CPU paths of kernels/ beside the same ops in eager and in compiled torch; prints a Markdown table.

    python -m benchmarks.cpu_kernels [--threads 1] [--only scan] [--no-compile]

Each cell is the fastest of the runs that fit into its time, on one thread in CPU time, on more in wall time:
what other processes take from the machine is not the kernel's. The last column gives what the CPU path
achieves: to hold against a copy's bytes/s where memory is the limit, a large float32 GEMM's FLOP/s elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from kernels.gated_rms_norm import gated_group_rms_norm
from kernels.kv_cache import store_kv
from kernels.paged_attention_decode import paged_attention_decode
from kernels.paged_attention_prefill import paged_attention_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.selective_state_update import selective_state_update
from kernels.ssd_chunk_scan import ssd_chunk_scan

NO_LIMIT = (0.0, float("inf"))


@dataclass(frozen=True)
class Case:
    """One op at one shape: ``eager`` is the op in plain torch, ``ours`` the CPU path of kernels/."""

    op: str
    shape: str
    eager: Callable[[], object]
    ours: Callable[[], object]
    bytes_moved: int = 0  # compulsory traffic, where memory is the limit
    flops: int = 0  # of the CPU path, where arithmetic is


@dataclass(frozen=True)
class MambaShape:
    name: str
    num_heads: int
    head_dim: int
    state_dim: int
    num_taps: int = 4

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.state_dim


MAMBA_SHAPES = [MambaShape("2 M", 8, 32, 64), MambaShape("120 M", 24, 64, 128)]


def state_update_cases() -> Iterator[Case]:
    for shape in MAMBA_SHAPES:
        for num_rows in (1, 8, 32):
            H, P, N = shape.num_heads, shape.head_dim, shape.state_dim
            x, dt = torch.randn(num_rows, 1, H, P), torch.randn(num_rows, 1, H)
            B, C = torch.randn(2, num_rows, 1, 1, N)
            A, D, dt_bias = -torch.rand(H), torch.randn(H), torch.randn(H)
            pool = torch.zeros(num_rows + 1, H, P, N)
            slots = torch.arange(1, num_rows + 1, dtype=torch.int32)

            def eager(x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias, pool=pool, slots=slots):
                step = F.softplus(dt[:, 0] + dt_bias).clamp(*NO_LIMIT)
                decay = torch.exp(step * A)[:, :, None, None]
                h = pool[slots] * decay + (step[..., None] * x[:, 0])[..., None] * B[:, 0, :, None]
                pool[slots] = h
                return (h @ C[:, 0, :, :, None]).squeeze(-1) + D[:, None] * x[:, 0]

            def ours(args=(x, dt, A, B, C, D, dt_bias, pool, slots, slots[:, None])):
                return selective_state_update(*args, dt_limit=NO_LIMIT)

            moved = 2 * num_rows * H * P * N * 4
            yield Case("selective_state_update", f"{shape.name}, batch {num_rows}", eager, ours, moved)


def conv_update_cases() -> Iterator[Case]:
    for shape in MAMBA_SHAPES:
        for num_rows in (1, 8, 32):
            num_channels, num_past = shape.num_channels, shape.num_taps - 1
            x = torch.randn(num_rows, 1, num_channels)
            weight, bias = torch.randn(num_channels, shape.num_taps), torch.randn(num_channels)
            pool = torch.zeros(num_rows + 1, num_channels, num_past)
            slots = torch.arange(1, num_rows + 1, dtype=torch.int32)

            def eager(x=x, weight=weight, bias=bias, pool=pool, slots=slots):
                window = torch.cat([pool[slots], x.transpose(1, 2)], dim=2)
                pool[slots] = window[:, :, 1:]
                return F.silu((window * weight).sum(dim=2) + bias)

            def ours(args=(x, weight, bias, pool, slots, slots[:, None])):
                return causal_conv1d_update(*args)

            moved = num_rows * num_channels * (2 * num_past + 2) * 4
            yield Case("causal_conv1d_update", f"{shape.name}, batch {num_rows}", eager, ours, moved)


def conv_cases() -> Iterator[Case]:
    for shape in MAMBA_SHAPES:
        for num_tokens in (256, 1024):
            num_channels, num_past = shape.num_channels, shape.num_taps - 1
            x = torch.randn(num_tokens, num_channels)
            weight, bias = torch.randn(num_channels, shape.num_taps), torch.randn(num_channels)
            pool = torch.zeros(2, num_channels, num_past)
            slot = torch.tensor([1]).int()
            index = (torch.tensor([0, num_tokens]).int(), slot, slot, torch.tensor([True]))

            def eager(x=x, weight=weight, bias=bias, pool=pool):
                window = torch.cat([pool[1], x.T], dim=1)
                pool[1] = window[:, -pool.shape[2] :]
                y = F.conv1d(window[None], weight[:, None], bias, groups=len(weight))
                return F.silu(y)[0].T.contiguous()

            def ours(args=(x, weight, bias, pool, *index), max_seq_len=num_tokens):
                return causal_conv1d(*args, max_seq_len=max_seq_len)

            moved = 2 * num_tokens * num_channels * 4
            yield Case("causal_conv1d", f"{shape.name}, {num_tokens} tokens", eager, ours, moved)


def scan_cases() -> Iterator[Case]:
    for shape in MAMBA_SHAPES:
        for num_tokens in (256, 1024):
            H, P, N = shape.num_heads, shape.head_dim, shape.state_dim
            x, dt = torch.randn(num_tokens, H, P), torch.randn(num_tokens, H)
            B, C = torch.randn(2, num_tokens, 1, N)
            A, D, dt_bias = -torch.rand(H), torch.randn(H), torch.randn(H)
            pool = torch.zeros(2, H, P, N)
            slot = torch.tensor([1]).int()
            index = (torch.tensor([0, num_tokens]).int(), slot, slot, torch.tensor([True]))
            operands = (x, dt, A, B, C, D, dt_bias, pool)

            def eager(operands=operands):
                return chunked_scan(*operands)

            def ours(args=(*operands, *index), max_seq_len=num_tokens):
                return ssd_chunk_scan(*args, chunk_size=64, dt_limit=NO_LIMIT, max_seq_len=max_seq_len)

            flops = 5 * num_tokens * H * P * N
            yield Case("ssd_chunk_scan", f"{shape.name}, {num_tokens} tokens", eager, ours, flops=flops)


def chunked_scan(x, dt, A, B, C, D, dt_bias, pool, chunk=64):
    """SSD as GEMMs, one group, for whole chunks of 64 tokens (16, 32, 128 and 256 are slower)."""
    num_heads, head_dim, state_dim = pool.shape[1:]
    step = F.softplus(dt + dt_bias).clamp(*NO_LIMIT).T.contiguous()
    log_decay, heads = step * A[:, None], x.transpose(0, 1)
    h, y = pool[1], []
    for t in range(0, len(x), chunk):
        B_t, C_t, x_t = B[t : t + chunk, 0], C[t : t + chunk, 0], heads[:, t : t + chunk]
        step_t, cumulated = step[:, t : t + chunk], log_decay[:, t : t + chunk].cumsum(dim=1)
        decay = (cumulated[:, :, None] - cumulated[:, None, :]).exp().tril()
        scores = decay * step_t[:, None] * (C_t @ B_t.T)
        before = (C_t @ h.view(-1, state_dim).T).view(chunk, num_heads, head_dim).transpose(0, 1)
        y.append(torch.baddbmm(before * cumulated.exp()[:, :, None], scores, x_t))
        weighted = x_t * (step_t * (cumulated[:, -1:] - cumulated).exp())[:, :, None]
        update = weighted.transpose(1, 2).reshape(-1, chunk) @ B_t
        h = h * cumulated[:, -1].exp()[:, None, None] + update.view_as(h)
    pool[1] = h
    return torch.cat(y, dim=1).transpose(0, 1) + D[:, None] * x


def attention_pool(seq_lens: list[int], num_heads: int, kv_heads: int, head_dim: int, block_size: int = 16):
    """Caches, block table and lengths of rows whose blocks lie scattered in a pool of two layers."""
    columns = -(-max(seq_lens) // block_size)
    num_blocks = 1 + len(seq_lens) * columns
    pool = torch.randn(num_blocks, kv_heads, 2, 2, block_size, head_dim)
    block_table = (torch.randperm(num_blocks - 1) + 1).int().view(len(seq_lens), columns)
    return pool[:, :, 1, 0], pool[:, :, 1, 1], block_table, torch.tensor(seq_lens, dtype=torch.int32)


def gathered_attention(q, k_cache, v_cache, block_table, seq_lens):
    """scaled_dot_product_attention row by row, q ``[R, T, QH, D]``, over K and V made contiguous."""
    out = []
    for row, seq_len in enumerate(seq_lens.tolist()):
        k, v = (
            cache[block_table[row]].transpose(0, 1).flatten(1, 2)[None, :, :seq_len]
            for cache in (k_cache, v_cache)
        )
        causal = q.shape[1] > 1
        q_row = q[row].transpose(0, 1)[None]
        out.append(F.scaled_dot_product_attention(q_row, k, v, is_causal=causal, enable_gqa=True)[0])
    return torch.stack(out).transpose(1, 2)


ATTENTION_SHAPES = [("2 M", 4, 2, 64), ("120 M", 8, 2, 128)]  # query heads, KV heads, head_dim


def attention_decode_cases() -> Iterator[Case]:
    for name, num_heads, kv_heads, head_dim in ATTENTION_SHAPES:
        for num_rows, seq_len in itertools.product((1, 8, 32), (256, 1024, 4096)):
            caches = attention_pool([seq_len] * num_rows, num_heads, kv_heads, head_dim)
            q = torch.randn(num_rows, 1, num_heads, head_dim)

            def eager(args=(q, *caches)):
                return gathered_attention(*args)

            def ours(args=(q, *caches), scale=head_dim**-0.5, max_seq_len=seq_len):
                return paged_attention_decode(*args, scale=scale, max_seq_len=max_seq_len)

            moved = 2 * num_rows * seq_len * kv_heads * head_dim * 4
            shape = f"{name}, batch {num_rows}, context {seq_len}"
            yield Case("paged_attention_decode", shape, eager, ours, moved)


def attention_prefill_cases() -> Iterator[Case]:
    for name, num_heads, kv_heads, head_dim in ATTENTION_SHAPES:
        for seq_len in (256, 1024, 4096):
            caches = attention_pool([seq_len], num_heads, kv_heads, head_dim)
            q = torch.randn(1, seq_len, num_heads, head_dim)
            *views, seq_lens = caches
            args = (q[0], *views, torch.tensor([0, seq_len]).int(), seq_lens)

            def eager(args=(q, *caches)):
                return gathered_attention(*args)

            def ours(args=args, scale=head_dim**-0.5, length=seq_len):
                return paged_attention_prefill(*args, scale=scale, max_query_len=length, max_seq_len=length)

            flops = 2 * seq_len * seq_len * num_heads * head_dim
            yield Case("paged_attention_prefill", f"{name}, {seq_len} tokens", eager, ours, flops=flops)


def store_kv_cases() -> Iterator[Case]:
    for name, num_heads, kv_heads, head_dim in ATTENTION_SHAPES:
        for num_tokens in (1, 32, 512):
            k_cache, v_cache, *_ = attention_pool([1024] * 8, num_heads, kv_heads, head_dim)
            k, v = torch.randn(2, num_tokens, kv_heads, head_dim)
            slots = torch.randperm(8 * 1024)[:num_tokens] + 16

            def eager(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots):
                k_cache[slots // 16, :, slots % 16] = k
                v_cache[slots // 16, :, slots % 16] = v

            def ours(args=(k, v, k_cache, v_cache, slots)):
                store_kv(*args)

            moved = 4 * num_tokens * kv_heads * head_dim * 4
            yield Case("store_kv", f"{name}, {num_tokens} tokens", eager, ours, moved)


def norm_cases() -> Iterator[Case]:
    for num_tokens, hidden_size in itertools.product((1, 32, 512), (256, 768)):
        x, residual = torch.randn(2, num_tokens, hidden_size)
        z, weight = torch.randn(num_tokens, 3 * hidden_size)[:, :hidden_size], torch.ones(hidden_size)
        shape, size = f"[{num_tokens}, {hidden_size}]", 4 * num_tokens * hidden_size

        def eager(x=x, weight=weight):
            return F.rms_norm(x, weight.shape, weight, 1e-5)

        def ours(x=x, weight=weight):
            return rms_norm(x, weight, 1e-5)

        yield Case("rms_norm", shape, eager, ours, 2 * size)

        def eager_add(x=x, residual=residual, weight=weight):
            total = residual + x
            return F.rms_norm(total, weight.shape, weight, 1e-5), total

        def ours_add(x=x, residual=residual, weight=weight):
            return add_rms_norm(x, residual, weight, 1e-5)

        yield Case("add_rms_norm", shape, eager_add, ours_add, 4 * size)

        def eager_gated(x=x, z=z, weight=weight):
            return F.rms_norm(x * F.silu(z), weight.shape, weight, 1e-5)

        def ours_gated(x=x, z=z, weight=weight):
            return gated_group_rms_norm(x, z, weight, group_size=weight.shape[0], eps=1e-5)

        yield Case("gated_group_rms_norm", shape, eager_gated, ours_gated, 3 * size)


CASES = [
    state_update_cases,
    conv_update_cases,
    conv_cases,
    scan_cases,
    attention_decode_cases,
    attention_prefill_cases,
    store_kv_cases,
    norm_cases,
]


def fastest_s(fn: Callable[[], object], budget_s: float) -> float:
    """The shortest of the runs that fit into the budget, after three to warm up."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(3):
        fn()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        start = clock()
        fn()
        best = min(best, clock() - start)
    return best


def machine_limits() -> tuple[float, float]:
    """Bytes/s, read plus written, of a large copy, and FLOP/s of a large float32 GEMM."""
    source = torch.ones(2**24)
    target = torch.empty_like(source)
    matrix = torch.randn(1024, 1024)
    copy_s = fastest_s(lambda: target.copy_(source), 0.5)
    return 2 * source.nbytes / copy_s, 2 * 1024**3 / fastest_s(lambda: matrix @ matrix, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="substring of the ops to run")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes minutes")
    parser.add_argument("--seconds", type=float, default=0.5, help="time a cell")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    copy_rate, gemm_rate = machine_limits()
    print(f"{options.threads} thread(s), microseconds; copy {copy_rate / 1e9:.1f} GB/s,", end=" ")
    print(f"GEMM {gemm_rate / 1e9:.0f} GFLOP/s\n")
    print("| op | shape | eager | torch.compile | ours | ours achieves |\n|---|---|---|---|---|---|")
    with torch.inference_mode():
        for case in (case for cases in CASES for case in cases()):
            if options.only not in case.op:
                continue
            eager_s, ours_s = (fastest_s(fn, options.seconds) for fn in (case.eager, case.ours))
            compiled = "–"
            if not options.no_compile:
                torch.compiler.reset()
                compiled_s = fastest_s(torch.compile(case.eager, dynamic=False), options.seconds)
                compiled = f"{compiled_s * 1e6:,.0f}"
            achieved = f"{case.flops / ours_s / 1e9:.0f} GFLOP/s"
            if case.bytes_moved:
                achieved = f"{case.bytes_moved / ours_s / 1e9:.1f} GB/s"
            cells = f"{eager_s * 1e6:,.0f} | {compiled} | {ours_s * 1e6:,.0f}"
            print(f"| {case.op} | {case.shape} | {cells} | {achieved} |", flush=True)


if __name__ == "__main__":
    main()
