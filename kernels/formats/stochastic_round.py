"""Rounding of recurrent states to bfloat16: to nearest, or randomly up or down in proportion to nearness.

    stored = cut(bits of x + noise)     cut drops the lower 16 bits of a float32; NaN stays NaN
    noise  = 0x7FFF + last bit kept                                              nearest, ties to even
           = mix(key + element * GOLDEN) >> 16                                   stochastic: 16 random bits
    key    = mix(mix(layer_seed + head) + position)      layer_seed = mix(SEED + layer), made odd

Every token adds to the state. If the state is rounded to nearest, additions below half of its last digit are
lost, permanently and always in the same direction. With stochastic rounding, the stored state has the right
expectation.

The noise is a hash of an element's place: how many tokens the state has seen, the layer, the head among all
heads of the model, and the element's index within the head. The noise depends on nothing else: not on slot,
row, batch, request or rank, and not on how tokens were divided into steps. So equal sums are stored as equal
bits wherever they are computed. All arithmetic of the noise wraps around at 32 bits. The function mix is Hash
Prospector's "lowbias32" (C. Wellons, 2018; public domain).

| for | use |
|---|---|
| torch | :func:`round_bfloat16_reference` |
| Triton | :func:`rounding_key`, :func:`round_state` |
| CPU kernels | ``rounding_key``, ``rounded`` of kernels/cpu/vector.py |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kernels.gpu.triton_jit import tl, triton_jit

SEED = 0x7F4A7C15
GOLDEN, MIX_1, MIX_2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
_MASK = 0xFFFFFFFF

GRID_TOKENS = 64
"""A prefill rounds a state of 16 bits after each multiple of this many tokens of its sequence, and at the end
of a row."""


@dataclass(frozen=True)
class StateRounding:
    """How one layer's states are rounded if they are stored in 16 bits."""

    is_stochastic: bool = False
    layer_seed: int = 0
    first_head: int = 0
    """The index in the model of the first head that this rank has."""

    @classmethod
    def stochastic(cls, layer: int, first_head: int = 0) -> StateRounding:
        """Return stochastic rounding. ``layer`` is any number unique to the layer, such as its index among
        the model's recurrent layers."""
        return cls(True, mix(SEED + layer) | 1, first_head)

    @property
    def arguments(self) -> tuple[int, int, int]:
        """The arguments for CPU kernels."""
        return int(self.is_stochastic), self.layer_seed, self.first_head

    @property
    def signed_seed(self) -> int:
        """The seed for Triton kernels: int32 and odd, so that all layers run the same compiled kernel."""
        return self.layer_seed - (1 << 32) if self.layer_seed >> 31 else self.layer_seed


NEAREST = StateRounding()
_Integers = TypeVar("_Integers", int, Tensor)


def mix(x: _Integers) -> _Integers:
    """Mix the 32 bits of an int, or of an int64 tensor's elements, well. The mapping is one to one."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    return x ^ (x >> 16)


def round_bfloat16_reference(state: Tensor, positions: Tensor, rounding: StateRounding) -> Tensor:
    """Round float32 ``state`` ``[..., H, *shape]`` of H heads to bfloat16, after ``positions`` ``[...]``
    tokens."""
    if not rounding.is_stochastic:
        return state.to(torch.bfloat16)
    outer, (num_heads, *shape) = positions.shape, state.shape[positions.ndim :]
    heads = torch.arange(num_heads, device=state.device) + rounding.first_head
    keys = mix(mix(rounding.layer_seed + heads) + positions.long()[..., None])
    elements = torch.arange(torch.Size(shape).numel(), device=state.device)
    noise = mix(keys[..., None] + elements * GOLDEN) >> 16
    bits = state.contiguous().view(torch.int32).long() & _MASK
    cut = ((bits + noise.view(*outer, num_heads, *shape)) & 0xFFFF0000).to(torch.uint32)
    return torch.where(state.isnan(), torch.nan, cut.view(torch.float32)).to(torch.bfloat16)


@triton_jit
def rounding_key(layer_seed, head, position):
    """Return the key of one head's state after ``position`` tokens: uint32."""
    return _mix_block(_mix_block(layer_seed.to(tl.uint32) + head.to(tl.uint32)) + position.to(tl.uint32))


@triton_jit
def round_state(state, key, elements, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Round float32 ``state`` for a pool of ``DTYPE``.

    ``elements``, int32 in the state's shape, are the indices of the elements within the head.
    """
    if tl.bfloat16 == DTYPE:
        bits = state.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            noise = _mix_block(key + elements.to(tl.uint32) * 0x9E3779B9) >> 16
        else:
            noise = ((bits >> 16) & 1) + 0x7FFF
        cut = ((bits + noise) >> 16) << 16
        state = tl.where(state == state, cut.to(tl.float32, bitcast=True), state)
    return state


@triton_jit
def _mix_block(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
