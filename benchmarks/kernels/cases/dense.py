"""Norms, linear layers and experts."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from benchmarks.kernels.cases import eager, work
from benchmarks.kernels.cases.case import LEAST_TOKENS, Call, Case, case_name, random
from benchmarks.kernels.cases.models import Model
from engine.models.layers.linear import Linear
from engine.models.layers.moe import GroupedExperts, StackedExperts
from kernels.linear.quantized_weight import QuantizedWeight
from kernels.norms.rms_norm import add_rms_norm, rms_norm

EPS = 1e-5


def norm(model: Model, rows: int, *, compiled: bool = False) -> Case:
    shape = rows, model.config.hidden_size

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            x=random(device, model.dtype, *shape),
            weight=random(device, model.dtype, model.config.hidden_size),
        )

    def torch_eager(o: SimpleNamespace) -> Call:
        return lambda: F.rms_norm(o.x, o.weight.shape, o.weight, EPS)

    return Case(
        "rms_norm",
        case_name(model, rows=rows),
        work.rms_norm(*shape, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        lambda o: lambda: rms_norm(o.x, o.weight, EPS),
        {"F.rms_norm": torch_eager},
        compiled="F.rms_norm" if compiled else None,
        replayed=rows < LEAST_TOKENS,
    )


def add_norm(model: Model, rows: int, *, compiled: bool = False) -> Case:
    shape = rows, model.config.hidden_size

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            x=random(device, model.dtype, *shape),
            residual=random(device, model.dtype, *shape),
            weight=random(device, model.dtype, model.config.hidden_size),
        )

    return Case(
        "add_rms_norm",
        case_name(model, rows=rows),
        work.add_rms_norm(*shape, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        lambda o: lambda: add_rms_norm(o.x, o.residual, o.weight, EPS),
        {"add, F.rms_norm": lambda o: lambda: eager.add_rms_norm(o.x, o.residual, o.weight, EPS)},
        compiled="add, F.rms_norm" if compiled else None,
        replayed=rows < LEAST_TOKENS,
    )


def linear(model: Model, layer: str, rows: int) -> Case:
    """``layer``: ``in_proj`` (of a mixer), ``up_proj``, ``down_proj`` or ``lm_head``. On a GPU, "ours" is
    torch's; its peer is our own code, whose rows have the same bits in every batch."""
    hidden, intermediate = model.config.hidden_size, model.config.mlp.intermediate_size
    outputs, inputs = {
        "in_proj": (model.mamba.proj_size, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
        "lm_head": (model.config.vocab_size, hidden),
    }[layer]

    def operands(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            x=random(device, model.dtype, rows, inputs),
            weight=random(device, model.dtype, outputs, inputs),
        )

    def ours(o: SimpleNamespace) -> Call:
        layer, x = Linear(o.weight), o.x
        return lambda: layer(x)

    def invariant(o: SimpleNamespace) -> Call:
        layer, x = Linear(o.weight, batch_invariant=True), o.x
        return lambda: layer(x)

    def torch_eager(o: SimpleNamespace) -> Call:
        return lambda: F.linear(o.x, o.weight)

    return Case(
        f"linear, {layer}",
        case_name(model, rows=rows),
        work.linear(rows, inputs, outputs, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        {"batch-invariant": invariant} if model.device == "cuda" else {"F.linear": torch_eager},
        replayed=rows < LEAST_TOKENS,
    )


def quantized_linear(model: Model, rows: int) -> Case:
    """``in_proj`` of a mixer in FP8, with scales for blocks of 128 by 128."""
    outputs, inputs = model.mamba.proj_size, model.config.hidden_size

    def operands(device: torch.device) -> SimpleNamespace:
        codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=device) & 0xF7  # no NaN
        scales = torch.rand(-(-outputs // 128), -(-inputs // 128), device=device) / 100
        return SimpleNamespace(
            x=random(device, model.dtype, rows, inputs),
            weight=QuantizedWeight(codes.view(torch.float8_e4m3fn), scales, 128, 128),
        )

    def ours(o: SimpleNamespace) -> Call:
        layer, x = Linear(o.weight), o.x
        return lambda: layer(x)

    def unquantized(o: SimpleNamespace) -> Call:
        weight, x = o.weight.dequantized(model.dtype), o.x
        return lambda: F.linear(x, weight)

    return Case(
        "linear, in_proj, FP8",
        case_name(model, rows=rows),
        work.quantized_linear(rows, inputs, outputs, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        {"F.linear, not quantised": unquantized},
        replayed=rows < LEAST_TOKENS,
    )


def experts(model: Model, rows: int) -> Case:
    """Tokens are spread evenly over the experts; the experts of one token are all different."""
    shape = model.experts
    up_shape = shape.num_experts, shape.intermediate_size, shape.hidden_size

    def operands(device: torch.device) -> SimpleNamespace:
        place = torch.arange(rows * shape.per_token, device=device) % shape.num_experts
        expert_ids = torch.randperm(shape.num_experts, device=device)[place].view(rows, shape.per_token)
        scale = shape.hidden_size**-0.5
        return SimpleNamespace(
            x=random(device, model.dtype, rows, shape.hidden_size),
            up=random(device, model.dtype, *up_shape) * scale,
            down=random(device, model.dtype, *up_shape).transpose(1, 2).contiguous() * scale,
            expert_ids=expert_ids,
            expert_weights=torch.rand(rows, shape.per_token, device=device),
        )

    def ours(o: SimpleNamespace) -> Call:
        make = StackedExperts if model.device == "cuda" else GroupedExperts
        layer = make(list(o.up.unbind()), list(o.down.unbind()), "relu_squared")
        return lambda: layer.forward(o.x, o.expert_ids, o.expert_weights)

    def invariant(o: SimpleNamespace) -> Call:
        layer = StackedExperts(
            list(o.up.unbind()), list(o.down.unbind()), "relu_squared", batch_invariant=True
        )
        return lambda: layer.forward(o.x, o.expert_ids, o.expert_weights)

    def torch_eager(o: SimpleNamespace) -> Call:
        return lambda: eager.experts(o.x, o.up, o.down, o.expert_ids, o.expert_weights)

    return Case(
        "experts",
        f"{case_name(model, rows=rows)}, {shape.per_token} of {shape.num_experts}",
        work.experts(
            rows,
            shape.num_experts,
            shape.per_token,
            shape.hidden_size,
            shape.intermediate_size,
            model.dtype.itemsize,
        ),
        model.weight_bytes,
        operands,
        ours,
        {"loop": torch_eager, "batch-invariant": invariant}
        if model.device == "cuda"
        else {"loop": torch_eager},
        replayed=rows < LEAST_TOKENS,
    )
