"""The CPU paths of kernels/ beside the same ops in eager and in compiled torch; prints a Markdown table.

    python -m benchmarks.cpu_kernels [--threads 1] [--only scan] [--no-compile]

Each cell is the fastest of the runs that fit into its time, on one thread in CPU time, on more in wall time:
what other processes take from the machine is not the kernel's. The last column gives what the CPU path
achieves: to hold against a copy's bytes/s where memory is the limit, a large float32 GEMM's FLOP/s elsewhere.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
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

            flops = 6 * num_tokens * H * P * N
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


CASES = [state_update_cases, conv_update_cases, conv_cases, scan_cases]


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
