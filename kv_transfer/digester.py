"""Digests of this server's blocks and states, and the thread that computes the long ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.memory.caches import Caches
from engine.memory.index_pool import NULL_INDEX
from kernels.digests.unit_digest import unit_digests
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
        self._block_words = _words(caches.kv_words)
        self._state_words = _words(caches.state)
        is_cuda = caches.device.type == "cuda"
        self._stream = torch.cuda.Stream(caches.device) if is_cuda else None  # type: ignore[no-untyped-call]
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
        whole = block_ids if last_tokens == 0 else block_ids[:-1]
        digests = self._digests(self._block_words, whole)
        if last_tokens:
            digests += self._digests(self._covered(block_ids[-1], last_tokens), [0])
        return tuple(digests)

    def state(self, slot: int) -> int:
        """Returns a state's digest; 0 if the model has none."""
        if self._caches.state_layout.unit_bytes == 0:
            return 0
        return self._digests(self._state_words, [slot])[0]

    def is_quick(self, num_blocks: int, num_slots: int) -> bool:
        """Whether any thread may digest so many units: a GPU has to be waited for."""
        num_bytes = (
            num_blocks * self._caches.kv_layout.unit_bytes + num_slots * self._caches.state_layout.unit_bytes
        )
        return self._stream is None and num_bytes <= QUICK_BYTES

    def post(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on the digesting thread, after what was posted before."""
        self._thread.post(work)

    def close(self) -> None:
        self._thread.stop()

    def _covered(self, block_id: int, num_tokens: int) -> torch.Tensor:
        """Returns the first tokens of a block as words ``[1, n]``."""
        tokens = self._caches.kv_words[block_id][..., :num_tokens, :].contiguous().view(-1).view(torch.uint8)
        return _words(torch.nn.functional.pad(tokens, (0, -len(tokens) % WORD_BYTES))[None])

    def _digests(self, words: torch.Tensor, units: Sequence[int]) -> list[int]:
        indices = torch.tensor(units, dtype=torch.int64)
        if self._stream is None:
            signed = unit_digests(words, indices)
        else:
            with torch.cuda.stream(self._stream):
                signed = unit_digests(words, indices.to(words.device)).cpu()
        unsigned: list[int] = signed.numpy().view("uint64").tolist()
        return unsigned


def _words(pool: torch.Tensor) -> torch.Tensor:
    """Returns a pool's view ``[num_units, unit_words]`` int64."""
    num_bytes = pool[0].numel() * pool.element_size()
    words = pool.view(-1).view(torch.int64) if pool.numel() else pool.new_empty(0, dtype=torch.int64)
    return words.view(len(pool), num_bytes // WORD_BYTES)
