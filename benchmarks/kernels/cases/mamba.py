"""Ops of a Mamba-2 mixer: convolution and recurrence of decode rows and of prompts, the norm at the end."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.kernels.cases import eager, peers, work
from benchmarks.kernels.cases.case import LEAST_TOKENS, Call, Case, case_name, in_pool, random
from benchmarks.kernels.cases.models import Model
from benchmarks.kernels.cases.state_slots import one_prompt, own_slots, peers_on
from kernels.norms.gated_rms_norm import gated_group_rms_norm
from kernels.ssm.causal_conv1d import causal_conv1d, causal_conv1d_update
from kernels.ssm.selective_state_update import selective_state_update
from kernels.ssm.ssd_chunk_scan import ssd_chunk_scan

NO_LIMIT = (0.0, float("inf"))
EPS = 1e-5


def state_update(model: Model, rows: int, positions: int, *, compiled: bool = False) -> Case:
    """Rows with their own slots; a speculating row has a slot for every position."""
    mamba = model.mamba
    H, P, N, G = mamba.num_heads, mamba.head_dim, mamba.state_size, mamba.num_groups

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            x=random(device, model.dtype, rows, positions, H, P),
            dt=random(device, model.dtype, rows, positions, H),
            A=-torch.rand(H, device=device),
            B=random(device, model.dtype, rows, positions, G, N),
            C=random(device, model.dtype, rows, positions, G, N),
            D=random(device, torch.float32, H),
            dt_bias=random(device, torch.float32, H),
            pool=in_pool(random(device, torch.float32, rows * positions + 1, H, P, N)),
            **own_slots(device, rows, positions),
        )

    def arguments(o: SimpleNamespace) -> tuple[torch.Tensor, ...]:
        return o.x, o.dt, o.A, o.B, o.C, o.D, o.dt_bias, o.pool, o.read_slots, o.write_slots

    def ours(o: SimpleNamespace) -> Call:
        args = arguments(o)
        return lambda: selective_state_update(*args, dt_limit=NO_LIMIT)

    def torch_eager(o: SimpleNamespace) -> Call:
        args = arguments(o)
        return lambda: eager.state_update(*args)

    calls = f", {positions} calls" if positions > 1 else ""
    return Case(
        "selective_state_update",
        case_name(model, rows=rows, positions=positions),
        work.selective_state_update(rows, positions, H, P, N, G, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        peers_on(model, torch_eager, {f"mamba-ssm{calls}": peers.mamba_state_update}),
        compiled="eager" if compiled else None,
        replayed=True,
    )


def conv_update(model: Model, rows: int, positions: int, *, compiled: bool = False) -> Case:
    channels, width = model.mamba.conv_channels, model.mamba.conv_width

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            x=random(device, model.dtype, rows, positions, channels),
            weight=random(device, model.dtype, channels, width),
            bias=random(device, model.dtype, channels),
            pool=in_pool(random(device, model.dtype, rows * positions + 1, channels, width - 1)),
            **own_slots(device, rows, positions),
        )

    def ours(o: SimpleNamespace) -> Call:
        args = o.x, o.weight, o.bias, o.pool, o.read_slots, o.write_slots
        return lambda: causal_conv1d_update(*args)

    def torch_eager(o: SimpleNamespace) -> Call:
        args = o.x, o.weight, o.bias, o.pool, o.read_slots, o.write_slots
        return lambda: eager.conv_update(*args)

    return Case(
        "causal_conv1d_update",
        case_name(model, rows=rows, positions=positions),
        work.causal_conv1d_update(rows, positions, channels, width, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        peers_on(model, torch_eager, {"causal-conv1d": peers.causal_conv1d_update}),
        compiled="eager" if compiled else None,
        replayed=True,
    )


def conv(model: Model, tokens: int, *, compiled: bool = False) -> Case:
    """One prompt from its beginning."""
    channels, width = model.mamba.conv_channels, model.mamba.conv_width

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            x=random(device, model.dtype, tokens, channels),
            weight=random(device, model.dtype, channels, width),
            bias=random(device, model.dtype, channels),
            pool=in_pool(random(device, model.dtype, 2, channels, width - 1)),
        )

    def ours(o: SimpleNamespace) -> Call:
        args = o.x, o.weight, o.bias, o.pool, *one_prompt(o.x)
        return lambda: causal_conv1d(*args, max_seq_len=tokens)

    def torch_eager(o: SimpleNamespace) -> Call:
        return lambda: eager.conv(o.x, o.weight, o.bias, o.pool)

    return Case(
        "causal_conv1d",
        case_name(model, tokens=tokens),
        work.causal_conv1d(tokens, channels, width, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        peers_on(model, torch_eager, {"causal-conv1d": peers.causal_conv1d, "eager": torch_eager}),
        compiled="eager" if compiled else None,
    )


def scan(model: Model, tokens: int) -> Case:
    """One prompt from its beginning."""
    mamba = model.mamba
    H, P, N, G = mamba.num_heads, mamba.head_dim, mamba.state_size, mamba.num_groups

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            x=random(device, model.dtype, tokens, H, P),
            dt=random(device, model.dtype, tokens, H),
            A=-torch.rand(H, device=device),
            B=random(device, model.dtype, tokens, G, N),
            C=random(device, model.dtype, tokens, G, N),
            D=random(device, torch.float32, H),
            dt_bias=random(device, torch.float32, H),
            pool=in_pool(random(device, torch.float32, 2, H, P, N)),
            chunk_size=model.mamba.chunk_size,
        )

    def ours(o: SimpleNamespace) -> Call:
        args = o.x, o.dt, o.A, o.B, o.C, o.D, o.dt_bias, o.pool, *one_prompt(o.x)
        return lambda: ssd_chunk_scan(
            *args, chunk_size=model.mamba.chunk_size, dt_limit=NO_LIMIT, max_seq_len=tokens
        )

    def torch_eager(o: SimpleNamespace) -> Call:
        return lambda: eager.chunk_scan(o.x, o.dt, o.A, o.B, o.C, o.D, o.dt_bias, o.pool)

    return Case(
        "ssd_chunk_scan",
        case_name(model, tokens=tokens),
        work.ssd_chunk_scan(tokens, H, P, N, G, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        peers_on(model, torch_eager, {"mamba-ssm": peers.mamba_chunk_scan}),
    )


def gated_norm(model: Model, rows: int, *, compiled: bool = False) -> Case:
    width = model.mamba.d_inner
    group_size = width // model.mamba.num_groups

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            y=random(device, model.dtype, rows, width),
            z=random(device, model.dtype, rows, width),
            weight=random(device, model.dtype, width),
            group_size=group_size,
            eps=EPS,
        )

    def ours(o: SimpleNamespace) -> Call:
        return lambda: gated_group_rms_norm(o.y, o.z, o.weight, group_size=group_size, eps=EPS)

    def torch_eager(o: SimpleNamespace) -> Call:
        return lambda: eager.gated_rms_norm(o.y, o.z, o.weight, group_size, EPS)

    return Case(
        "gated_group_rms_norm",
        case_name(model, rows=rows),
        work.gated_rms_norm(rows, width, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        peers_on(model, torch_eager, {"mamba-ssm": peers.mamba_gated_norm, "eager": torch_eager}),
        compiled="eager" if compiled else None,
        replayed=rows < LEAST_TOKENS,
    )
