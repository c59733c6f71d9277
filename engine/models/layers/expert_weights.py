"""Loads the weights of routed experts, which are stored in one tensor for all experts or in one for each.

In shapes, ``E`` is the number of experts, ``I`` an expert's intermediate size, and ``size`` the size of its
inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.mixer_config import MoeConfig
from engine.checkpoint.weights import OneOf, Part, Weights, of_inputs, of_outputs
from engine.models.layers.linear import StoredWeights, joined, stored_alike
from engine.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class ExpertNames:
    """A family's tensor names, without the layer's prefix."""

    stacked: tuple[str, str]
    """Names of two stacks: the up projections of all experts ``[E, I, size]``, and their down projections
    ``[E, size, I]``. For gated experts the first stack is ``[E, 2 I, size]``: each expert's gate, then its up
    projection. Stacks named ``….weight`` may be quantised."""
    inputs: tuple[str, ...] = ()
    """Names of one expert's input projections, as in ``experts.{e}.{input}.weight``: up, or gate and up.
    Empty if the family always stacks its experts."""
    output: str = "down_proj"


NEMOTRON_EXPERTS = ExpertNames(stacked=("experts.up_proj", "experts.down_proj"), inputs=("up_proj",))
GATED_EXPERTS = ExpertNames(
    stacked=("experts.gate_up_proj", "experts.down_proj"), inputs=("gate_proj", "up_proj")
)
"""Names of Qwen and most other families."""


def load_experts(
    config: MoeConfig, size: int, weights: Weights, prefix: str, tp: TensorParallel, names: ExpertNames
) -> tuple[StoredWeights, StoredWeights]:
    """Load a share of each expert's up ``[I, size]`` (``[2 I, size]`` if gated) and down ``[size, I]``.

    With expert parallelism the rank loads some of the experts, each of them whole.
    """
    held, is_whole = tp.experts.share(config.num_experts), tp.experts.size > 1
    share = range(config.intermediate_size) if is_whole else tp.share(config.intermediate_size)
    part = share.start, share.stop
    if _are_quantized(weights, prefix, names.stacked):
        return _quantized_stacks(config, size, weights, prefix, held, part, names.stacked)
    if not names.inputs or prefix + names.stacked[0] in weights:
        return _stacked(config, size, weights, prefix, held if is_whole else None, part, names.stacked)
    up_shape, down_shape = (config.intermediate_size, size), (size, config.intermediate_size)
    ups, downs = [], []
    for expert in held:
        one = f"{prefix}experts.{expert}."
        up = [weights.take_weight(one + name, up_shape, part=of_outputs(part)) for name in names.inputs]
        ups.append(joined(up, weights.dtype))
        downs.append(weights.take_weight(one + names.output, down_shape, part=of_inputs(part)))
    return stored_alike(ups, weights.dtype), stored_alike(downs, weights.dtype)


def _are_quantized(weights: Weights, prefix: str, names: tuple[str, str]) -> bool:
    layers = [prefix + name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return bool(layers) and any(map(weights.is_quantized, layers))


def _quantized_stacks(
    config: MoeConfig,
    size: int,
    weights: Weights,
    prefix: str,
    held: range,
    part: tuple[int, int],
    names: tuple[str, str],
) -> tuple[StoredWeights, StoredWeights]:
    """Load ``part`` of the inner channels of the experts in ``held``."""
    inner, (start, stop) = config.intermediate_size, part
    up, down = (prefix + name.removesuffix(".weight") for name in names)
    num_inputs = 2 if config.activation == "silu_gated" else 1
    up_part = of_outputs(*((i * inner + start, i * inner + stop) for i in range(num_inputs)))
    places = [OneOf(expert, config.num_experts) for expert in held]
    ups = [weights.take_weight(up, (num_inputs * inner, size), part=up_part, of=one) for one in places]
    downs = [weights.take_weight(down, (size, inner), part=of_inputs(part), of=one) for one in places]
    return stored_alike(ups, weights.dtype), stored_alike(downs, weights.dtype)


def _stacked(
    config: MoeConfig,
    size: int,
    weights: Weights,
    prefix: str,
    held: range | None,
    part: tuple[int, int],
    names: tuple[str, str],
) -> tuple[StoredWeights, StoredWeights]:
    """Load ``part`` of every expert's inner channels. If ``held`` names experts, load only these, whole."""
    inner, (start, stop) = config.intermediate_size, part
    num_inputs = 2 if config.activation == "silu_gated" else 1
    up_part = Part(1, tuple((i * inner + start, i * inner + stop) for i in range(num_inputs)))
    down_part = Part(2, (part,))
    if held is not None:
        up_part = down_part = Part(0, ((held.start, held.stop),))
    up = weights.take_stack(prefix + names[0], (config.num_experts, num_inputs * inner, size), part=up_part)
    return up, weights.take_stack(prefix + names[1], (config.num_experts, size, inner), part=down_part)
