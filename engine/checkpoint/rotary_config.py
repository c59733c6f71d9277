"""A checkpoint's rotary embedding: reads ``rope_parameters`` and its older spellings.

transformers 5 writes ``rope_parameters`` (type, theta, partial factor in one object). Older releases wrote
``rope_theta`` and ``partial_rotary_factor`` outside the object ``rope_scaling``, whose type was named
``type`` or ``rope_type``. Frequencies are computed as in transformers, operation by operation in float32, so
that they have the same bits:

| type | frequencies, f_j = theta^(-2j / rotary_dim) | |
|---|---|---|
| `default` | f | RoFormer, arXiv:2104.09864 |
| `linear` | f / factor | position interpolation, arXiv:2306.15595 |
| `dynamic` | f for sequences up to `max_position_embeddings`; no server runs longer ones | |
| `llama3` | f / factor for long waves, f for short waves, between them a mixture of the two | Llama 3.1 |
| `yarn` | as llama3 with another mixture; cosine and sine are scaled | YaRN, arXiv:2309.00071 |
| `mrope` | f: a token has three positions; for text they are equal | Qwen2-VL, arXiv:2409.12191 |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.config_fields import ConfigFields
from kernels.attention.rotary import Rotary

_OUTSIDE = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
"""Fields that may be inside the object ``rope_parameters`` or outside it."""
_MROPE = {"mrope_section", "mrope_interleaved"}
"""Fields that assign frequencies to a token's three positions."""


@dataclass(frozen=True)
class RotaryConfig:
    """Frequencies of one kind of attention layer."""

    inv_freq: tuple[float, ...]
    """Radians per position, for each pair of a head's elements; float32 values."""
    attention_scaling: float = 1.0
    """Factor of cosine and sine."""

    @property
    def rotary_dim(self) -> int:
        """Number of a head's elements that are rotated."""
        return 2 * len(self.inv_freq)

    @classmethod
    def read(
        cls,
        fields: ConfigFields,
        head_dim: int,
        *,
        theta: float = 10_000.0,
        partial_rotary_factor: float = 1.0,
    ) -> RotaryConfig:
        """Read a ``config.json``. ``theta`` and ``partial_rotary_factor`` are the family's defaults.

        Raises :class:`wire.errors.ModelLoadError` that names the missing or unsupported field.
        """
        parameters = _parameters(fields, theta, partial_rotary_factor)
        kind = parameters.choice("rope_type", "type", choices=tuple(_FREQUENCIES), default="default")
        frequencies, names = _FREQUENCIES[kind]
        _refuse_unknown(parameters, names, kind)
        factor = parameters.number("partial_rotary_factor")
        rotary_dim = int(head_dim * factor)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise parameters.error(
                "partial_rotary_factor", factor, f"an even part of the {head_dim} elements of a head"
            )
        inv_freq, attention_scaling = frequencies(parameters, rotary_dim)
        return cls(tuple(inv_freq.tolist()), attention_scaling)

    def on(self, device: torch.device | str) -> Rotary:
        """Make the input of :mod:`kernels.attention.rotary`. All layers can share the result."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=device)
        return Rotary(inv_freq, self.attention_scaling)


def _parameters(fields: ConfigFields, theta: float, partial_rotary_factor: float) -> ConfigFields:
    """Unite all spellings. As in transformers, ``rope_scaling`` is preferred to ``rope_parameters``."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise fields.error(name, value, "an object or null")
        if value and any(isinstance(part, dict) for part in value.values()):
            raise fields.error(
                name, value, "one set for all layers; a set for each layer type is not supported"
            )
        found = found or dict(value or {})
    beside = {name: fields.raw[name] for name in _OUTSIDE if fields.raw.get(name) is not None}
    raw = {"rope_theta": theta, "partial_rotary_factor": partial_rotary_factor} | beside
    raw |= {name: value for name, value in found.items() if value is not None}
    # The models were trained with the length that stands outside the object: use that length.
    if "original_max_position_embeddings" in beside:
        raw["original_max_position_embeddings"] = beside["original_max_position_embeddings"]
    raw["max_position_embeddings"] = fields.raw.get("max_position_embeddings")
    return replace(fields, raw=raw)


def _refuse_unknown(parameters: ConfigFields, names: set[str], kind: str) -> None:
    known = names | _OUTSIDE | _MROPE | {"rope_type", "type", "max_position_embeddings"}
    unknown = sorted(parameters.raw.keys() - known)
    if unknown:
        raise parameters.error(
            f"{unknown[0]} of the rotary embedding",
            parameters.raw[unknown[0]],
            f"no such field: rope_type {kind} has {', '.join(sorted(names)) or 'no parameters of its own'}",
        )


def _plain(parameters: ConfigFields, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    return 1.0 / (parameters.number("rope_theta", above=0.0) ** exponents)


def _default(parameters: ConfigFields, rotary_dim: int) -> tuple[Tensor, float]:
    return _plain(parameters, rotary_dim), 1.0


def _linear(parameters: ConfigFields, rotary_dim: int) -> tuple[Tensor, float]:
    return _plain(parameters, rotary_dim) / parameters.number("factor", above=0.0), 1.0


def _llama3(parameters: ConfigFields, rotary_dim: int) -> tuple[Tensor, float]:
    inv_freq = _plain(parameters, rotary_dim)
    factor = parameters.number("factor", above=0.0)
    low, high = parameters.number("low_freq_factor", above=0.0), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.error("high_freq_factor", high, f"more than low_freq_factor ({low:g})")
    length = _original_length(parameters)
    wave_length = 2 * math.pi / inv_freq
    is_long, is_short = wave_length > length / low, wave_length < length / high
    share = (length / wave_length - low) / (high - low)
    between = (1 - share) * inv_freq / factor + share * inv_freq
    ends = torch.where(is_long, inv_freq / factor, inv_freq)
    return torch.where(is_long | is_short, ends, between), 1.0


def _yarn(parameters: ConfigFields, rotary_dim: int) -> tuple[Tensor, float]:
    theta, length = parameters.number("rope_theta", above=1.0), _original_length(parameters)
    factor = parameters.number(
        "factor", default=parameters.integer("max_position_embeddings") / length, above=0.0
    )
    beta_fast = parameters.number("beta_fast", default=32.0) or 32.0
    beta_slow = parameters.number("beta_slow", default=1.0) or 1.0
    low, high = (
        rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (beta_fast, beta_slow)
    )
    if parameters.boolean("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # otherwise the ramp would divide by zero
    steps = torch.arange(rotary_dim // 2, dtype=torch.float32)
    kept = 1 - torch.clamp((steps - low) / (high - low), 0, 1)
    waves = theta ** (torch.arange(0, rotary_dim, 2).to(torch.float32) / rotary_dim)
    inv_freq = 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept
    return inv_freq, _yarn_scaling(parameters, factor)


def _yarn_scaling(parameters: ConfigFields, factor: float) -> float:
    """Compute the factor of YaRN, section 3.4; ``mscale`` and ``mscale_all_dim`` are from DeepSeek-V2."""

    def scaling(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale = parameters.number("mscale", default=0.0)
    mscale_all_dim = parameters.number("mscale_all_dim", default=0.0)
    implied = scaling(mscale) / scaling(mscale_all_dim) if mscale and mscale_all_dim else scaling(1.0)
    return parameters.number("attention_factor", default=implied)


def _original_length(parameters: ConfigFields) -> int:
    """Return the context length in tokens before the context was stretched."""
    return parameters.integer("original_max_position_embeddings", "max_position_embeddings")


_Frequencies = Callable[[ConfigFields, int], tuple[Tensor, float]]

_FREQUENCIES: dict[str, tuple[_Frequencies, set[str]]] = {
    "default": (_default, set()),
    "linear": (_linear, {"factor"}),
    "dynamic": (_default, {"factor"}),
    "llama3": (_llama3, {"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": (
        _yarn,
        {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"},
    ),
    "mrope": (_default, set()),
}
"""For each type its function and the parameters that are specific to the type."""
