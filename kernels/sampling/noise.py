"""The noise of the race that draws tokens: a number in (0, 1) for each (seed, index, token).

    key      = mix(mix(seed + G) + (index + 1) G)           64 bits; mix is SplitMix64's, G its increment
    low, high = lower and upper 32 bits of key
    z        = v G32 + low
    z        = (z ^ z >> 16) 0x7FEB352D ^ high
    z        = (z ^ z >> 15) 0x846CA68B                     32 bits
    coarse   = z ^ z >> 16
    fine     = the upper 20 bits of mix(key + (v + 1) G)
    u        = (2^20 coarse + fine + 1/2) 2^-52

``v`` is the token. ``coarse`` is cheap in vector registers and permutes all 32-bit numbers, so it differs for
any two tokens. It alone shows that nearly all tokens can't win (:mod:`kernels.sampling.sample_tokens`); only
for the few others is ``fine`` computed. u has 52 bits: odd multiples of 2^-53, which float64 can all
represent, so neither u nor 1 - u is ever 0.

SplitMix64: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014. The 32-bit mixer
is lowbias32 (Wellons, Prospecting for Hash Functions, 2018), with half the key added between its products.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiler import cpu_function
from kernels.gpu.triton_jit import tl, triton_jit

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GOLDEN_32, MIX_3, MIX_4 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
FINE_BITS = 20
_WORD = (1 << 32) - 1


def noise(seeds: Tensor, index: Tensor, token_ids: Tensor) -> Tensor:
    """Return numbers in (0, 1), float64, in the shape to which the int64 arguments broadcast."""
    key = _mix(_mix(seeds + _signed(GOLDEN)) + (index + 1) * _signed(GOLDEN))
    fine = _shift_right(_mix(key + (token_ids + 1) * _signed(GOLDEN)), 64 - FINE_BITS)
    bits = (_coarse(key, token_ids) << FINE_BITS) + fine
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def _coarse(key: Tensor, token_ids: Tensor) -> Tensor:
    # Products of 32 bits in int64 overflow, but their lower 32 bits are right.
    z = (token_ids * GOLDEN_32 + (key & _WORD)) & _WORD
    z = (((z ^ (z >> 16)) * MIX_3) & _WORD) ^ _shift_right(key, 32)
    z = ((z ^ (z >> 15)) * MIX_4) & _WORD
    return z ^ (z >> 16)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(MIX_2)
    return z ^ _shift_right(z, 31)


def _signed(constant: int) -> int:
    """Return the constant as int64, since torch has no uint64 arithmetic."""
    return constant - (1 << 64)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift logically: int64's own shift would extend the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@triton_jit
def key_of(seed, index, GOLDEN: tl.constexpr = GOLDEN):
    """Return the key of a row's noise at an index, uint64."""
    return _mix_block(_mix_block(seed.to(tl.uint64) + GOLDEN) + (index + 1).to(tl.uint64) * GOLDEN)


@triton_jit
def coarse_block(
    key, v, GOLDEN_32: tl.constexpr = GOLDEN_32, M_3: tl.constexpr = MIX_3, M_4: tl.constexpr = MIX_4
):
    """Return the coarse bits of tokens ``v``, uint32."""
    z = v.to(tl.uint32) * GOLDEN_32 + key.to(tl.uint32)
    z = ((z ^ (z >> 16)) * M_3) ^ (key >> 32).to(tl.uint32)
    z = (z ^ (z >> 15)) * M_4
    return z ^ (z >> 16)


@triton_jit
def noise_block(key, coarse, v, GOLDEN: tl.constexpr = GOLDEN):
    """Return u of tokens ``v``, float64."""
    fine = _mix_block(key + (v + 1).to(tl.uint64) * GOLDEN) >> 44
    bits = (coarse.to(tl.uint64) << 20) | fine
    return (bits.to(tl.float64) + 0.5) * (1 / (1 << 52))


@triton_jit
def _mix_block(z, M_1: tl.constexpr = MIX_1, M_2: tl.constexpr = MIX_2):
    z = (z ^ (z >> 30)) * M_1
    z = (z ^ (z >> 27)) * M_2
    return z ^ (z >> 31)


_GOLDEN_U64, _MIX_1_U64, _MIX_2_U64 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)


@cpu_function
def _mix_u64(z):
    z = (z ^ (z >> np.uint64(30))) * _MIX_1_U64
    z = (z ^ (z >> np.uint64(27))) * _MIX_2_U64
    return z ^ (z >> np.uint64(31))


@cpu_function
def noise_key(seed, index):
    """Return the key of a row's noise at an index, uint64."""
    return _mix_u64(_mix_u64(np.uint64(seed) + _GOLDEN_U64) + np.uint64(index + 1) * _GOLDEN_U64)


@cpu_function
def coarse_noise(key, token):
    """Return the coarse bits of one token, uint32."""
    z = np.uint32(np.uint32(token) * np.uint32(GOLDEN_32) + np.uint32(key & np.uint64(_WORD)))
    z = np.uint32((z ^ (z >> np.uint32(16))) * np.uint32(MIX_3)) ^ np.uint32(key >> np.uint64(32))
    z = np.uint32((z ^ (z >> np.uint32(15))) * np.uint32(MIX_4))
    return np.uint32(z ^ (z >> np.uint32(16)))


@cpu_function
def token_noise(key, token):
    """Return u of one token."""
    fine = _mix_u64(key + np.uint64(token + 1) * _GOLDEN_U64) >> np.uint64(64 - FINE_BITS)
    bits = (np.uint64(coarse_noise(key, token)) << np.uint64(FINE_BITS)) | fine
    return (np.float64(bits) + 0.5) * 2.0**-52
