"""Digests of this server's blocks and states, and the thread that computes the long ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.memory.caches import Caches
from engine.memory.index_pool import NULL_INDEX
from kernels.digests.unit_digest import PoolDigests, array_digest
from kv_transfer.nixl.poll_thread import PollThread

QUICK_BYTES = 1 << 20
"""What any thread may digest at once: it takes a CPU 30 µs, less than a change of thread."""
WORD_BYTES = 8


class Digester:
    """Digests units of the pools. Any thread may call :meth:`blocks`, :meth:`state` and :meth:`post`.

    The engine's thread never digests. ``on_fatal`` gets a bug of the digesting thread.
    """

    def __init__(self, caches: Caches, on_fatal: Callable[[BaseException], None]) -> None:
        self._caches = caches
        self.block_size = caches.block_size
        is_cuda = caches.device.type == "cuda"
        self._stream = torch.cuda.Stream(caches.device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._blocks = PoolDigests(_words(caches.kv_words))
        self._states = PoolDigests(_words(caches.state))
        self._kv = np.empty(0) if is_cuda else caches.kv_words.numpy()
        self._thread = PollThread("digest", caches.device, on_fatal)
        self._thread.start(lambda: None)
        self.blocks([NULL_INDEX, NULL_INDEX], 1)  # compiles: no request waits for it
        self.state(NULL_INDEX)

    @staticmethod
    def takes(caches: Caches) -> bool:
        """Whether these pools can be digested: units are whole words."""
        layouts = caches.kv_layout, caches.state_layout
        return all(layout.unit_bytes % WORD_BYTES == 0 for layout in layouts)

    def blocks(self, block_ids: Sequence[int], last_tokens: int = 0) -> tuple[int, ...]:
        """Returns the blocks' digests. Of the last block, only the first ``last_tokens`` tokens count.

        With 0, all of them do. What lies behind these tokens means nothing, and a step that was launched
        before may still write it.
        """
        if not block_ids or self._caches.kv_layout.unit_bytes == 0:
            return (0,) * len(block_ids)
        if last_tokens == 0:
            return tuple(self._on_stream(self._blocks, block_ids))
        whole = self._on_stream(self._blocks, block_ids[:-1]) if len(block_ids) > 1 else []
        return (*whole, self._first_tokens(block_ids[-1], last_tokens))

    def state(self, slot: int) -> int:
        """Returns a state's digest; 0 if the model has none."""
        if self._caches.state_layout.unit_bytes == 0:
            return 0
        return self._on_stream(self._states, [slot])[0]

    def is_quick(self, num_blocks: int, num_slots: int) -> bool:
        """Whether any thread may digest so many units: a GPU has to be waited for."""
        return self._stream is None and self.num_bytes(num_blocks, num_slots) <= QUICK_BYTES

    def num_bytes(self, num_blocks: int, num_slots: int) -> int:
        """Returns the bytes of so many units."""
        blocks, slots = self._caches.kv_layout, self._caches.state_layout
        return num_blocks * blocks.unit_bytes + num_slots * slots.unit_bytes

    def post(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on the digesting thread, after what was posted before."""
        self._thread.post(work)

    def close(self) -> None:
        self._thread.stop()

    def _first_tokens(self, block_id: int, num_tokens: int) -> int:
        """Returns the digest of a block's first tokens."""
        if self._stream is None:
            return array_digest(self._kv[block_id, ..., :num_tokens, :])
        with torch.cuda.stream(self._stream):
            return array_digest(self._caches.kv_words[block_id, ..., :num_tokens, :].cpu().numpy())

    def _on_stream(self, pool: PoolDigests, units: Sequence[int]) -> list[int]:
        if self._stream is None:
            return pool(units)
        with torch.cuda.stream(self._stream):
            return pool(units)


def _words(pool: torch.Tensor) -> torch.Tensor:
    """Returns a pool's view ``[num_units, unit_words]`` int64."""
    num_bytes = pool[0].numel() * pool.element_size()
    words = pool.view(-1).view(torch.int64) if pool.numel() else pool.new_empty(0, dtype=torch.int64)
    return words.view(len(pool), num_bytes // WORD_BYTES)
