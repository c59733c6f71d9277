"""Random numbers that depend on a request's seed and a position, and on nothing else.

A generator with hidden state would give a request other tokens when its batch changes, when it is
preempted, or when it moves to another server. A counter-based one can't.
"""

from __future__ import annotations

import torch

# SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014),
# as signed constants since torch has no uint64 arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), float64, in the shape that the int64 ``seeds`` and ``positions`` broadcast to.

    Of 52 bits: with 53 the largest, times a sum, could round up to that sum, and a draw there would lie
    behind the last token that has any weight.
    """
    bits = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 12).to(torch.float64) * 2.0**-52


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own would drag the sign bit along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
