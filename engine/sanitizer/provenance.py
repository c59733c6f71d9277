"""Tags of blocks and slots, kept on the host: which request wrote which prefix there, in which epoch.

A tag names the prefix by a running digest of its tokens and by its length. Every index of a pool has an
*epoch*, a number. When the index is freed, its epoch increases, and tags of earlier epochs are no longer
valid.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.memory.index_pool import IndexPool
from engine.request import Request

_REJECTED = -1
"""Length in the tag of a slot whose state followed a rejected draft."""


class PrefixDigest:
    """Running 64-bit digest of one request's tokens; remembers the digest at each block's end."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hash = _new_hash()
        self._num_tokens = 0
        self._at_block_ends = array("Q")

    def at(self, tokens: Sequence[int], num_tokens: int) -> int:
        """Returns the digest of ``tokens[:num_tokens]``.

        Hashes from the start only if ``num_tokens`` lies inside a block, and before the last digested token.
        """
        self._advance(tokens, num_tokens)
        blocks, rest = divmod(num_tokens, self._block_size)
        if rest == 0 and blocks:
            return self._at_block_ends[blocks - 1]
        if num_tokens == self._num_tokens:
            return _as_int(self._hash)
        whole = _new_hash()
        whole.update(array("q", tokens[:num_tokens]))
        return _as_int(whole)

    def over_blocks(self, tokens: Sequence[int], num_tokens: int) -> NDArray[np.uint64]:
        """Returns the digest at the end of each block that ``num_tokens`` tokens reach. If the last block is
        not full, its digest is the one after ``num_tokens`` tokens."""
        last = self.at(tokens, num_tokens)
        blocks, rest = divmod(num_tokens, self._block_size)
        digests = self._at_block_ends[:blocks]
        if rest:
            digests.append(last)
        return np.frombuffer(digests, dtype=np.uint64)

    def _advance(self, tokens: Sequence[int], num_tokens: int) -> None:
        while self._num_tokens < num_tokens:
            block_end = self._num_tokens - self._num_tokens % self._block_size + self._block_size
            end = min(num_tokens, block_end)
            self._hash.update(array("q", tokens[self._num_tokens : end]))
            self._num_tokens = end
            if end == block_end:
                self._at_block_ends.append(_as_int(self._hash))


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


def _as_int(running: hashlib.blake2b) -> int:
    return int.from_bytes(running.digest(), "little")


class Epochs:
    """Counts the epochs of a pool's indices and collects the indices that were freed."""

    def __init__(self, pool: IndexPool) -> None:
        self.now = np.zeros(pool.size, dtype=np.int64)
        self.is_free = np.frombuffer(pool.free_map, dtype=np.uint8)
        """Live view ``[size]`` of the pool: 1 if the index is free."""
        self._freed: set[int] = set()
        pool.on_free(self._end_life)

    def _end_life(self, index: int) -> None:
        self.now[index] += 1
        self._freed.add(index)

    def take_freed(self) -> list[int]:
        """Returns the indices freed since the last call, including indices that were handed out again."""
        freed, self._freed = sorted(self._freed), set()
        return freed


@dataclass(frozen=True, slots=True)
class SlotTag:
    """Tag of the state after ``num_tokens`` tokens with digest ``digest``, written by request ``writer``."""

    writer: str
    digest: int
    num_tokens: int
    epoch: int

    def __str__(self) -> str:
        if self.num_tokens == _REJECTED:
            return f"the state behind a rejected draft of {self.writer!r}, epoch {self.epoch}"
        return f"h({self.num_tokens}) of {self.writer!r}, prefix {self.digest:016x}, epoch {self.epoch}"


class SlotTags:
    """One tag per slot, valid in the tag's epoch."""

    def __init__(self, pool: IndexPool) -> None:
        self.epochs = Epochs(pool)
        self._tags: list[SlotTag | None] = [None] * pool.size

    def current(self, slot: int) -> SlotTag | None:
        """Returns the tag of the present epoch; None: nothing has been written in this epoch."""
        tag = self._tags[slot]
        return tag if tag is not None and tag.epoch == self.epochs.now[slot] else None

    def last(self, slot: int) -> SlotTag | None:
        """Returns the newest tag, of the present epoch or an earlier one."""
        return self._tags[slot]

    def describe(self, slot: int) -> str:
        tag = self._tags[slot]
        if tag is None:
            return "nothing yet"
        now = self.epochs.now[slot]
        return str(tag) if tag.epoch == now else f"{tag}, freed since (epoch now {now})"

    def write(self, slot: int, request: Request, digest: int, num_tokens: int) -> None:
        self._tags[slot] = SlotTag(request.request_id, digest, num_tokens, int(self.epochs.now[slot]))

    def spoil(self, slot: int, request: Request) -> None:
        """Tags ``slot`` as holding the state after a rejected draft, which no row may read."""
        self.write(slot, request, 0, _REJECTED)

    def move(self, tag: SlotTag, slot: int) -> None:
        """Tags ``slot`` like ``tag``: the state has been moved there."""
        self._tags[slot] = SlotTag(tag.writer, tag.digest, tag.num_tokens, int(self.epochs.now[slot]))


class BlockTags:
    """For each block: digest and length of the prefix that ends with its contents, and the epoch of both."""

    def __init__(self, pool: IndexPool) -> None:
        self.epochs = Epochs(pool)
        self._digests = np.zeros(pool.size, dtype=np.uint64)
        self._lengths = np.zeros(pool.size, dtype=np.int64)
        self._written_in = np.full(pool.size, -1, dtype=np.int64)

    def write(
        self, block_ids: NDArray[np.int64], digests: NDArray[np.uint64], lengths: NDArray[np.int64]
    ) -> None:
        self._digests[block_ids] = digests
        self._lengths[block_ids] = lengths
        self._written_in[block_ids] = self.epochs.now[block_ids]

    def last(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Returns digest and length of each block's newest tag, of the present epoch or an earlier one."""
        return [(int(self._digests[block_id]), int(self._lengths[block_id])) for block_id in block_ids]

    def is_fresh(self, block_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each block: whether nothing has been written since it was handed out."""
        fresh: NDArray[np.bool_] = self._written_in[block_ids] != self.epochs.now[block_ids]
        return fresh

    def matches(
        self, block_ids: NDArray[np.int64], digests: NDArray[np.uint64], lengths: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """For each block: whether its contents end with that digest at that length."""
        equal: NDArray[np.bool_] = (self._digests[block_ids] == digests) & (
            self._lengths[block_ids] == lengths
        )
        return equal & ~self.is_fresh(block_ids)

    def describe(self, block_id: int) -> str:
        if self._written_in[block_id] < 0:
            return "nothing yet"
        return (
            f"a prefix of {self._lengths[block_id]} tokens, {int(self._digests[block_id]):016x}, "
            f"written in epoch {self._written_in[block_id]} of now {self.epochs.now[block_id]}"
        )
