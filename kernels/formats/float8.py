"""float8_e4m3fn, a format for cached keys and values: 1 sign, 4 exponent and 3 mantissa bits.

    byte s eeee mmm:  (-1)^s 2^(e - 7) (1 + m / 8), or (-1)^s 2^-6 m / 8 where e = 0;  0x7F and 0xFF are NaN

The largest number is 448, the smallest 2^-9. A number between two values is rounded to the nearer, ties to
even. Finite numbers above 448 become 448 (below -448: -448). Infinity becomes NaN, as it does in a softmax.
So a check for finite results finds an overflow even if the number was stored in this format. (PyTorch's own
conversion saturates only in some versions.)

| for | use |
|---|---|
| torch | :func:`to_e4m3` |
| Triton | :func:`narrow`, :func:`widen`, on a cache converted by :func:`writable` or :func:`readable` |
| CPU kernels | ``load`` and ``store`` of kernels/cpu/vector.py |

Formats: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.triton_jit import tl, triton_jit

E4M3_MAX = 448.0
_WITH_INSTRUCTIONS = (8, 9)
"""The lowest compute capability with instructions that convert e4m3. On older GPUs Triton refuses e4m3."""


def to_e4m3(x: Tensor) -> Tensor:
    """Convert any floating dtype to float8_e4m3fn as described above."""
    x = x.to(torch.float32)
    return torch.where(x.isfinite(), x.clamp(-E4M3_MAX, E4M3_MAX), torch.nan).to(torch.float8_e4m3fn)


def writable(cache: Tensor) -> Tensor:
    """Return the cache as a Triton kernel stores to it: as bytes if it is e4m3."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def readable(cache: Tensor) -> Tensor:
    """Return the cache as a Triton kernel loads it: e4m3 as bytes on a GPU without instructions for it."""
    if cache.is_cuda and torch.cuda.get_device_capability(cache.device) >= _WITH_INSTRUCTIONS:
        return cache
    return writable(cache)


@triton_jit
def narrow(x, scale, DTYPE: tl.constexpr):
    """Return ``x * scale`` as an e4m3 byte if ``DTYPE`` is uint8; else ``x`` in DTYPE, not scaled."""
    return _to_byte(x.to(tl.float32) * scale) if tl.uint8 == DTYPE else x.to(DTYPE)


@triton_jit
def widen(x, DTYPE: tl.constexpr):
    """Convert a value loaded from a cache to DTYPE. The conversion of e4m3 is exact."""
    return _from_byte(x).to(DTYPE) if x.dtype == tl.uint8 else x.to(DTYPE)


@triton_jit
def _to_byte(x):
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # The last bit of the sum is worth 2^-9, so the addition rounds to a multiple of 2^-9.
    at_16384 = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = at_16384.to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.minimum(tl.where(magnitude < (121 << 23), small, normal), 0x7E)
    byte = tl.where(magnitude < 0x7F800000, byte, 0x7F)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton_jit
def _from_byte(x):
    byte = x.to(tl.int32)
    magnitude = byte & 0x7F
    small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 8, small, (magnitude << 20) + (120 << 23))
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits) | ((byte & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)
