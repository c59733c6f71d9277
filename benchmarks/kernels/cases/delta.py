"""Ops of a Gated DeltaNet: the delta rule of decode rows and of prompts, the norm at the end."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.kernels.cases import eager, peers, work
from benchmarks.kernels.cases.case import LEAST_TOKENS, Call, Case, case_name, in_pool, random
from benchmarks.kernels.cases.models import Model
from benchmarks.kernels.cases.state_slots import one_prompt, own_slots, peers_on
from kernels.gated_delta.gated_delta_chunk import gated_delta_chunk
from kernels.gated_delta.gated_delta_update import gated_delta_update
from kernels.norms.gated_rms_norm import group_rms_norm_then_gate

EPS = 1e-6


def state_update(model: Model, rows: int, positions: int) -> Case:
    """Rows with their own slots; a speculating row has a slot for every position."""

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            **_tokens(model, device, rows, positions),
            pool=in_pool(random(device, torch.float32, rows * positions + 1, *model.delta.state_shape)),
            **own_slots(device, rows, positions),
        )

    def ours(o: SimpleNamespace) -> Call:
        args = *_arguments(o), o.read_slots, o.write_slots
        return lambda: gated_delta_update(*args)

    def torch_eager(o: SimpleNamespace) -> Call:
        args = *_arguments(o), o.read_slots, o.write_slots
        return lambda: eager.delta_update(*args)

    return Case(
        "gated_delta_update",
        case_name(model, rows=rows, positions=positions),
        work.gated_delta_update(rows, positions, *_sizes(model), model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        peers_on(model, torch_eager, {"fla": peers.fla_delta_update}),
        replayed=True,
    )


def scan(model: Model, tokens: int) -> Case:
    """One prompt from its beginning."""

    def operands(device: torch.device) -> SimpleNamespace:
        pool = in_pool(random(device, torch.float32, 2, *model.delta.state_shape))
        return SimpleNamespace(**_tokens(model, device, tokens), pool=pool)

    def ours(o: SimpleNamespace) -> Call:
        args = *_arguments(o), *one_prompt(o.q)
        return lambda: gated_delta_chunk(*args, max_seq_len=tokens)

    def torch_eager(o: SimpleNamespace) -> Call:
        args = _arguments(o)
        return lambda: eager.delta_chunk(*args)

    return Case(
        "gated_delta_chunk",
        case_name(model, tokens=tokens),
        work.gated_delta_chunk(tokens, *_sizes(model), model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        peers_on(model, torch_eager, {"fla": peers.fla_delta_chunk}),
    )


def gated_norm(model: Model, rows: int, *, compiled: bool = False) -> Case:
    """The norm over each value head, before its gate."""
    width, head_dim = model.delta.value_size, model.delta.value_head_dim

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            y=random(device, model.dtype, rows, width),
            z=random(device, model.dtype, rows, width),
            head_weight=random(device, model.dtype, head_dim),
            head_dim=head_dim,
            eps=EPS,
        )

    def ours(o: SimpleNamespace) -> Call:
        weight = o.head_weight.repeat(width // head_dim)
        return lambda: group_rms_norm_then_gate(o.y, o.z, weight, group_size=head_dim, eps=EPS)

    def torch_eager(o: SimpleNamespace) -> Call:
        return lambda: eager.norm_then_gate(o.y, o.z, o.head_weight, EPS)

    return Case(
        "group_rms_norm_then_gate",
        case_name(model, rows=rows),
        work.gated_rms_norm(rows, width, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        peers_on(model, torch_eager, {"fla": peers.fla_gated_norm, "eager": torch_eager}),
        compiled="eager" if compiled else None,
        replayed=rows < LEAST_TOKENS,
    )


def _sizes(model: Model) -> tuple[int, int, int, int]:
    delta = model.delta
    return delta.num_key_heads, delta.key_head_dim, delta.num_value_heads, delta.value_head_dim


def _tokens(model: Model, device: torch.device, *shape: int) -> dict[str, torch.Tensor]:
    key_heads, key_dim, heads, value_dim = _sizes(model)
    return {
        "q": random(device, model.dtype, *shape, key_heads, key_dim),
        "k": random(device, model.dtype, *shape, key_heads, key_dim),
        "v": random(device, model.dtype, *shape, heads, value_dim),
        "a": random(device, model.dtype, *shape, heads),
        "b": random(device, model.dtype, *shape, heads),
        "A": -torch.rand(heads, device=device),
        "dt_bias": random(device, torch.float32, heads),
    }


def _arguments(o: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    return o.q, o.k, o.v, o.a, o.b, o.A, o.dt_bias, o.pool
