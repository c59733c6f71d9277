"""Digests of units of a pool (blocks, or slots), to find bytes that are not the ones that were handed over.

    digest = Σ_s w_s · (Σ_j lo(x_sj ^ k_j) · hi(x_sj ^ k_j)  +  M · Σ_j x_sj)        mod 2^64

A unit's 64-bit words x are divided into stripes s of 1,024 words; lo and hi are a word's halves. The keys k_j
and the odd weights w_s are fixed functions of the position, so equal bytes have equal digests on any server.
The product depends on the word's place in its stripe, the weight on the stripe's place in the unit. A change
of a single word always changes the plain sum beside the product. The inner sum is that of XXH3
(https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), without its scrambling between stripes, which would
make a unit's stripes depend on one another. It guards against damage, not against forgery.

The keys of a stripe are 8 KB and stay in a core's first cache, so a digest reads each byte once. Measured on
one core of an EPYC (Zen 4): 37 GB/s from memory, like a plain sum, and 47 GB/s from its caches; XXH3 as
packaged for Python takes 20 to 39 GB/s, and there is none for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import as_array, cpu_jit
from kernels.gpu.triton_jit import tl, triton_jit

STRIPE = 1024
"""Words per stripe."""
MIX = np.uint64(0x9E3779B185EBCA87)
_SIGNED_MIX = int(MIX.view(np.int64))
_LOW = 0xFFFFFFFF
_LOW_64, _HALF = np.uint64(_LOW), np.uint64(32)


def unit_digests_reference(words: Tensor, units: Tensor) -> Tensor:
    """Reference of :class:`PoolDigests`, with torch's operators."""
    num_stripes = -(-words.shape[1] // STRIPE)
    padded = torch.zeros(len(units), num_stripes * STRIPE, dtype=torch.int64, device=words.device)
    padded[:, : words.shape[1]] = words.index_select(0, units)
    is_there = torch.arange(padded.shape[1], device=words.device) < words.shape[1]
    x, is_there = padded.view(-1, num_stripes, STRIPE), is_there.view(num_stripes, STRIPE)
    keyed = x ^ _keys(words.device)
    products = (keyed & _LOW) * ((keyed >> 32) & _LOW) * is_there
    stripes = products.sum(-1) + x.sum(-1) * _SIGNED_MIX
    return (stripes * _weights(num_stripes, words.device)).sum(-1)


# One program per (unit, stripe): 8 KB, eight 8-byte loads for each of 128 threads. The keys come from the
# second cache, where all programs share them. The stripes' values are added up by torch.
@triton_jit
def _stripe_digests_kernel(
    words_ptr,
    units_ptr,
    keys_ptr,
    weights_ptr,
    out_ptr,
    unit_words,
    num_stripes,
    MIX: tl.constexpr,
    STRIPE: tl.constexpr,
):
    place, stripe = tl.program_id(0).to(tl.int64), tl.program_id(1)
    unit = tl.load(units_ptr + place)
    columns = tl.arange(0, STRIPE)
    live = stripe * STRIPE + columns < unit_words
    x = tl.load(words_ptr + unit * unit_words + stripe * STRIPE + columns, mask=live, other=0)
    keyed = x ^ tl.load(keys_ptr + columns)
    products = tl.where(live, (keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF), 0)
    value = tl.sum(products, axis=0) + tl.sum(x, axis=0) * MIX
    tl.store(out_ptr + place * num_stripes + stripe, value * tl.load(weights_ptr + stripe))


def _launch(words: Tensor, units: Tensor) -> Tensor:
    num_units, unit_words = len(units), words.shape[1]
    num_stripes = -(-unit_words // STRIPE)
    out = torch.empty((num_units, num_stripes), dtype=torch.int64, device=words.device)
    if out.numel() > 0:
        tables = _keys(words.device), _weights(num_stripes, words.device)
        _stripe_digests_kernel[(num_units, num_stripes)](
            words, units, *tables, out, unit_words, num_stripes, MIX=_SIGNED_MIX, STRIPE=STRIPE, num_warps=4
        )
    return out.sum(dim=1)


@cpu_jit
def _unit_digests_cpu(words, unit_words, units, keys, weights, out, begin, end):
    for i in range(begin, end):
        digest = np.uint64(0)
        for stripe in range(len(weights)):
            start = units[i] * unit_words + stripe * STRIPE
            size = min(STRIPE, unit_words - stripe * STRIPE)
            x = words[start : start + size]
            products, plain = np.uint64(0), np.uint64(0)
            for j in range(size):
                keyed = x[j] ^ keys[j]
                products += (keyed & _LOW_64) * (keyed >> _HALF)
                plain += x[j]
            digest += (products + plain * MIX) * weights[stripe]
        out[i] = digest


class PoolDigests:
    """Digests units of one pool, which is bound once: a call takes 5 µs beside the kernel's own time."""

    def __init__(self, words: Tensor) -> None:
        """Bind a contiguous pool as int64, ``[num_units, unit_words]``."""
        self._words = words
        self._unit_words = words.shape[1]
        if words.is_cuda:
            return
        self._flat = as_array(words.view(-1)).view(np.uint64)
        self._tables = _tables(self._unit_words)

    def __call__(self, units: Sequence[int]) -> list[int]:
        """Return the digests of units as unsigned numbers. Waits for a GPU.

        On a CPU all is computed on the calling thread, without the GIL: other threads' kernels go on.
        """
        if self._words.is_cuda:
            on_device = torch.tensor(units, dtype=torch.int64).to(self._words.device)
            unsigned: list[int] = _launch(self._words, on_device).cpu().numpy().view(np.uint64).tolist()
            return unsigned
        return _digest(self._flat, self._unit_words, np.array(units, dtype=np.int64), self._tables)


def array_digest(numbers: np.ndarray) -> int:
    """Return the digest of an array on the host as if it were a unit; its end is filled with zeros."""
    data = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1)
    missing = -len(data) % 8
    words = (np.pad(data, (0, missing)) if missing else data).view(np.uint64)
    return _digest(words, len(words), np.zeros(1, dtype=np.int64), _tables(len(words)))[0]


def _digest(
    words: np.ndarray, unit_words: int, units: np.ndarray, tables: tuple[np.ndarray, ...]
) -> list[int]:
    out = np.zeros(len(units), dtype=np.uint64)
    if unit_words and len(units):
        _unit_digests_cpu(words, unit_words, units, *tables, out, 0, len(units))
    digests: list[int] = out.tolist()
    return digests


@cache
def _tables(unit_words: int) -> tuple[np.ndarray, np.ndarray]:
    return _mixed(0, STRIPE), _mixed(STRIPE, -(-unit_words // STRIPE)) | np.uint64(1)


@cache
def _keys(device: torch.device) -> Tensor:
    return torch.from_numpy(_mixed(0, STRIPE).view(np.int64)).to(device)


@cache
def _weights(num_stripes: int, device: torch.device) -> Tensor:
    odd = _mixed(STRIPE, num_stripes) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)


def _mixed(first: int, count: int) -> np.ndarray:
    """Return SplitMix64 of ``count`` positions from ``first`` on (Steele, Lea and Flood, 2014)."""
    x = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
