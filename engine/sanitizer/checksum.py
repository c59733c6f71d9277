"""Checksums of blocks and states. They are computed on the caches' device and cheap enough for every step.

    sum(unit) = Σ w_i · m_i  mod 2^64        m_i: words of the unit, w_i: one odd 64-bit weight per position

A unit is a block, or a part of a slot. Positions are numbered over all heads and channels of the whole model.
So the tensor-parallel ranks' sums of their shares add up to the sum of the whole unit, however many ranks
there are.

Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): the sum changes if
a word changes, moves, or changes places with another word. Weights are a fixed function of the position, so
two servers get equal sums from equal bytes. The sums guard against faults, not against forgery.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.memory.caches import SEGMENT_ALIGNMENT, Caches
from wire.messages.layout import Segment

CHUNK_BYTES = SEGMENT_ALIGNMENT
"""A state has one sum per chunk. No chunk holds bytes of two segments, so a sum identifies the layer."""
MAX_TEMPORARY_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Maximum bytes of products before they are added. The products should fit the cache of a CPU core, or the
free memory of a GPU."""


class Checksums:
    """Computes sums over blocks and slots."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._block_weights = _block_weights(caches)
        num_words = caches.state_layout.unit_bytes // 4
        self._state_words = caches.state.view(-1).view(torch.int32).view(caches.num_slots, num_words)
        self._state_weights = _weights(self._state_words.shape[1], caches.state.device)
        self._state_shares: list[Tensor] | None = None
        self.num_chunks = caches.state_layout.unit_bytes // CHUNK_BYTES

    def states(self, slots: Tensor) -> Tensor:
        """Returns ``[n, num_chunks]`` int64: sums of the ``n`` slots' chunks, padding included."""
        sums = [self._states(some) for some in torch.split(slots, self._per_pass(self._state_weights))]
        return torch.cat(sums) if sums else self._states(slots)

    def _states(self, slots: Tensor) -> Tensor:
        products = self._state_words.index_select(0, slots) * self._state_weights
        return products.view(len(slots), self.num_chunks, CHUNK_BYTES // 4).sum(dim=-1)

    def blocks(self, block_ids: Tensor, num_tokens: Tensor) -> Tensor:
        """Returns ``[n]`` int64: sums over the first ``num_tokens[i]`` tokens of block ``i``, all layers."""
        passes = self._per_pass(self._block_weights)
        pairs = zip(torch.split(block_ids, passes), torch.split(num_tokens, passes), strict=True)
        sums = [self._blocks(*pair) for pair in pairs]
        return torch.cat(sums) if sums else self._blocks(block_ids, num_tokens)

    def _blocks(self, block_ids: Tensor, num_tokens: Tensor) -> Tensor:
        tokens = (self._caches.kv_words.index_select(0, block_ids) * self._block_weights).sum(
            dim=(1, 2, 3, 5)
        )
        covered = torch.arange(tokens.shape[1], device=tokens.device) < num_tokens[:, None]
        return (tokens * covered).sum(dim=-1)

    def shares_of_blocks(self, block_ids: Tensor, num_tokens: Tensor) -> Tensor:
        """Returns the same as :meth:`blocks`, but zeros if another rank already counts the same heads."""
        sums = self.blocks(block_ids, num_tokens)
        return torch.zeros_like(sums) if self._caches.spec.copies_kv_heads else sums

    def shares_of_state(self, slot: int) -> Tensor:
        """Returns ``[num_segments]`` int64: sums without padding.

        Data that a lower rank holds too is left out.
        """
        sums = []
        for weights, segment in zip(self._share_weights(), self._caches.state_layout.segments, strict=True):
            data = self._caches.state[slot, segment.offset : segment.offset + segment.num_bytes]
            sums.append((data.view(torch.int16) * weights).sum())
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self._caches.kv.device)

    def _share_weights(self) -> list[Tensor]:
        """Returns one tensor of weights per segment; the first call makes them."""
        if self._state_shares is None:
            self._state_shares = [self._weights_of(segment) for segment in self._caches.state_layout.segments]
        return self._state_shares

    def _weights_of(self, segment: Segment) -> Tensor:
        row_words = segment.axes[0].stride // 2
        parts = []
        for index, (start, stop) in enumerate(segment.ranges):
            weights = _weights((stop - start) * row_words, self._caches.state.device, start * row_words)
            is_copy = self._caches.spec.copies_groups and segment.axes[0].name == "channels" and index > 0
            parts.append(torch.zeros_like(weights) if is_copy else weights)
        return torch.cat(parts)

    def segment_of(self, chunk: int) -> str:
        """Returns the name of the segment that a chunk lies in, such as ``conv.3`` or ``ssm.0``."""
        before = [s for s in self._caches.state_layout.segments if s.offset <= chunk * CHUNK_BYTES]
        return before[-1].name

    @property
    def segments(self) -> list[str]:
        """Names of a slot's segments, in the order of :meth:`shares_of_state`."""
        return [segment.name for segment in self._caches.state_layout.segments]

    def _per_pass(self, weights: Tensor) -> int:
        limit = MAX_TEMPORARY_BYTES[weights.device.type]
        return max(1, limit // max(1, 8 * weights.numel()))


def _block_weights(caches: Caches) -> Tensor:
    """Makes weights ``[kv_heads, attn_layers, 2, block_size, head_dim]``; without KV they are empty."""
    num_words, first_word = caches.kv[0].numel(), 0
    for segment in caches.kv_layout.segments:
        (first_head, _), *_ = segment.ranges
        first_word = first_head * (num_words // caches.spec.kv_heads)
    return _weights(num_words, caches.kv.device, first_word).view(caches.kv.shape[1:])


def _weights(count: int, device: torch.device, first: int = 0) -> Tensor:
    """Makes odd weights ``[count]`` int64: SplitMix64 of positions from ``first`` on (Steele, Lea and Flood,
    2014)."""
    x = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)
