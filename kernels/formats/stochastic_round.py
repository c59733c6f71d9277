"""Rounding of recurrent states to bfloat16: to nearest, or up or down by chance in proportion to nearness.

    stored = cut(bits of x + noise)     cut drops the lower 16 bits of a float32; NaN stays NaN
    noise  = 0x7FFF + last bit kept                                              nearest, ties to even
           = mix(key + element * GOLDEN) >> 16                                   stochastic: 16 random bits
    key    = mix(mix(layer_seed + head) + position)      layer_seed = mix(SEED + layer), made odd

A state that is added to at every token and rounded to nearest loses whatever is below half of its last digit,
for ever and always in the same direction. Rounded stochastically, its expectation is right.

The noise is a hash of where a number stands: the tokens that the state has seen, the layer, the head among
all of the model's, the element within the head. It depends on nothing else, neither slot, row, batch,
request, rank nor how steps were cut, so that equal sums are stored as equal bits wherever they are computed.
32 bits wrap around in all of this. mix: Hash Prospector's "lowbias32" (C. Wellons, 2018; public domain).

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
"""A prefill rounds its state of 16 bits at each multiple of it in its sequence, and where a row ends."""


@dataclass(frozen=True)
class StateRounding:
    """How one layer's states are rounded where they are stored in 16 bits."""

    is_stochastic: bool = False
    layer_seed: int = 0
    first_head: int = 0
    """Of those that this rank has, among the model's."""

    @classmethod
    def stochastic(cls, layer: int, first_head: int = 0) -> StateRounding:
        """``layer`` counts the model's recurrent layers, or is any other number of its own."""
        return cls(True, mix(SEED + layer) | 1, first_head)

    @property
    def arguments(self) -> tuple[int, int, int]:
        """As CPU kernels take it."""
        return int(self.is_stochastic), self.layer_seed, self.first_head

    @property
    def signed_seed(self) -> int:
        """As Triton kernels take it: int32 and odd, so that all layers run the same compiled kernel."""
        return self.layer_seed - (1 << 32) if self.layer_seed >> 31 else self.layer_seed


NEAREST = StateRounding()
_Integers = TypeVar("_Integers", int, Tensor)


def mix(x: _Integers) -> _Integers:
    """32 bits to 32 well mixed ones, one to one; of an int or an int64 tensor."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * MIX_1) & _MASK
    x = ((x ^ (x >> 15)) * MIX_2) & _MASK
    return x ^ (x >> 16)


def round_bfloat16_reference(state: Tensor, positions: Tensor, rounding: StateRounding) -> Tensor:
    """``state`` ``[..., H, *shape]`` float32, where ``positions`` ``[...]`` tokens are in it, to bfloat16."""
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
    """Of one head's state after ``position`` tokens: uint32."""
    return _mix_block(_mix_block(layer_seed.to(tl.uint32) + head.to(tl.uint32)) + position.to(tl.uint32))


@triton_jit
def round_state(state, key, elements, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """float32 ``state`` as it comes back from a pool of ``DTYPE``; ``elements`` are int32, of its shape."""
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
