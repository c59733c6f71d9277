"""Other projects' GPU kernels, bound to the operands of our cases. Raises ImportError if a package is not
installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.kernels.cases.case import Call, in_pool


def _mamba_ssm(name: str) -> ModuleType:
    """Returns a module of mamba-ssm's Triton kernels.

    The package's own ``__init__`` imports all of its models, and with them packages that these kernels do not
    need (tilelang, quack-kernels, a compiled extension). So its ``__init__`` is skipped.
    """
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("mamba_ssm is not installed")
        package = ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["mamba_ssm"] = package
    return importlib.import_module(f"mamba_ssm.ops.triton.{name}")


def mamba_state_update(o: SimpleNamespace) -> Call:
    """mamba-ssm takes one position per call and writes the slot that it reads."""
    update = _mamba_ssm("selective_state_update").selective_state_update
    num_positions, _, head_dim = o.x.shape[1:]
    state_size = o.B.shape[3]
    # Strides of zero tell it that a head's decay and step are one number.
    A = o.A[:, None, None].expand(-1, head_dim, state_size)
    D, dt_bias = (t[:, None].expand(-1, head_dim) for t in (o.D, o.dt_bias))
    steps = o.dt[..., None].expand(-1, -1, -1, head_dim)

    def call() -> torch.Tensor:
        y = [
            update(
                o.pool, o.x[:, i], steps[:, i], A, o.B[:, i], o.C[:, i], D,
                dt_bias=dt_bias, dt_softplus=True, state_batch_indices=o.read_slots,
            )
            for i in range(num_positions)
        ]  # fmt: skip
        return y[0][:, None] if num_positions == 1 else torch.stack(y, dim=1)

    return call


def mamba_chunk_scan(o: SimpleNamespace) -> Call:
    """It returns the state instead of storing it in a pool."""
    scan = _mamba_ssm("ssd_combined").mamba_chunk_scan_combined
    x, dt, B, C = (t[None] for t in (o.x, o.dt, o.B, o.C))

    def call() -> torch.Tensor:
        y, _ = scan(
            x,
            dt,
            o.A,
            B,
            C,
            o.chunk_size,
            D=o.D,
            dt_bias=o.dt_bias,
            dt_softplus=True,
            return_final_states=True,
        )
        return y[0]

    return call


def mamba_gated_norm(o: SimpleNamespace) -> Call:
    norm = _mamba_ssm("layernorm_gated").rmsnorm_fn
    return lambda: norm(
        o.y, o.weight, None, z=o.z, eps=o.eps, group_size=o.group_size, norm_before_gate=False
    )


def fla_delta_update(o: SimpleNamespace) -> Call:
    """fla takes all positions and a tensor of the rows' states, and returns the states after the last
    position."""
    update = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    states = o.pool[o.read_slots]
    gates = _fla_gates(o)
    return lambda: update(o.q, o.k, o.v, o.a, beta=o.b, initial_state=states, **gates)[0]


def fla_delta_chunk(o: SimpleNamespace) -> Call:
    """It returns the state instead of storing it in a pool."""
    scan = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v, a, b = (t[None] for t in (o.q, o.k, o.v, o.a, o.b))
    gates = _fla_gates(o)
    return lambda: scan(q, k, v, a, b, **gates)[0][0]


def fla_gated_norm(o: SimpleNamespace) -> Call:
    """fla treats heads as rows."""
    norm = importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
    y, z = (t.reshape(-1, o.head_dim) for t in (o.y, o.z))
    return lambda: norm(y, z, o.head_weight, None, activation="swish", eps=o.eps).view(o.y.shape)


def _fla_gates(o: SimpleNamespace) -> dict[str, object]:
    """Returns the options that make gates, norms and state layout equal to ours."""
    flags = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel")
    always = dict.fromkeys((*flags, "state_v_first", "output_final_state"), True)
    return {"A_log": torch.log(-o.A), "dt_bias": o.dt_bias, **always}


def causal_conv1d_update(o: SimpleNamespace) -> Call:
    """The peer takes all positions and keeps only the state after the last one."""
    update = importlib.import_module("causal_conv1d").causal_conv1d_update
    x = o.x.transpose(1, 2)
    return lambda: update(
        x, o.pool, o.weight, o.bias, activation="silu", conv_state_indices=o.read_slots
    ).transpose(1, 2)


def causal_conv1d(o: SimpleNamespace) -> Call:
    """Given the transposed view, the peer reads and writes channels next to one another, as we do."""
    convolve = importlib.import_module("causal_conv1d").causal_conv1d_fn
    x = o.x.T[None]
    return lambda: convolve(x, o.weight, o.bias, activation="silu")[0].T


def sdpa(o: SimpleNamespace) -> Call:
    """``scaled_dot_product_attention`` of rows of equal length over K and V that are already contiguous."""
    k, v = (
        in_pool(cache[o.block_table.long()].transpose(1, 2).flatten(2, 3)[:, :, : o.seq_len].contiguous())
        for cache in (o.k_cache, o.v_cache)
    )
    q = o.q.transpose(1, 2)  # [R, QH, T, D]
    num_queries = q.shape[2]
    mask = None
    if 1 < num_queries < o.seq_len:
        mask = torch.ones(num_queries, o.seq_len, dtype=torch.bool, device=q.device).tril(
            o.seq_len - num_queries
        )
    causal = num_queries == o.seq_len > 1
    return lambda: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
    ).transpose(1, 2)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Returns one workspace for all sets of operands, which take turns."""
    return torch.empty(256 << 20, dtype=torch.uint8, device=device)


def flashinfer_attention(o: SimpleNamespace) -> Call:
    """Decode attention for one query a row, prefill attention over the paged cache for more."""
    flashinfer = importlib.import_module("flashinfer")
    num_rows, num_queries, num_heads, head_dim = o.q.shape
    _, kv_heads, block_size, _ = o.k_cache.shape
    workspace = _workspace(o.q.device)
    columns = -(-o.seq_len // block_size)
    pages = torch.arange(num_rows + 1, dtype=torch.int32, device=o.q.device) * columns
    indices = o.block_table[:, :columns].reshape(-1).contiguous()
    last = torch.full_like(pages[1:], o.seq_len - (columns - 1) * block_size)
    sizes, dtypes = (num_heads, kv_heads, head_dim, block_size), o.q.dtype
    if num_queries == 1:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        decode.plan(pages, indices, last, *sizes, q_data_type=dtypes, kv_data_type=dtypes)
        q = o.q[:, 0]
        return lambda: decode.run(q, (o.k_cache, o.v_cache))[:, None]
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=o.q.device) * num_queries
    prefill.plan(starts, pages, indices, last, *sizes, causal=True, q_data_type=dtypes, kv_data_type=dtypes)
    q = o.q.flatten(0, 1)
    return lambda: prefill.run(q, (o.k_cache, o.v_cache)).view(o.q.shape)
