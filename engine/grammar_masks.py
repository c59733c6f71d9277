"""Which tokens the rows of a step may choose, as bits on the device.

A table by rows, like those of :mod:`engine.sampling_table`: steps gather theirs, so that a graph reads it at
one address. All bits are 1 in rows without a grammar, in cleared ones and in the null row.

What a position may choose depends on the drafts before it, so the host must know those, and the answer:
a row with a grammar waits until the step before has been read back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLExecutor

from engine.async_copy import upload
from engine.grammar import Matcher
from engine.request import Request
from engine.row_state import RowState
from kernels.token_mask import num_words
from wire.errors import GrammarError

MAX_THREADS = 8


class GrammarMasks:
    """Bit masks ``[N + 1, T, W]`` int32 of ``num_rows`` rows and the null row, ``T`` positions each."""

    def __init__(self, num_rows: int, num_positions: int, vocab_size: int, device: torch.device) -> None:
        host = torch.full((num_rows + 1, num_positions, num_words(vocab_size)), -1, dtype=torch.int32)
        self._host = host.numpy()
        self._num_positions = num_positions
        self._executor: LLExecutor | None = None
        self._matchers: dict[int, Matcher] = {}
        self.table = host.to(device)
        """On a CPU the host's own bytes."""

    def __bool__(self) -> bool:
        """Whether some row has a grammar."""
        return bool(self._matchers)

    def fill(self, request: Request) -> None:
        """A request begins to run in its row."""
        if request.matcher is not None:
            self._matchers[request.row] = request.matcher

    def clear(self, row: int) -> None:
        """Nobody is in the row: all tokens are allowed again."""
        if self._matchers.pop(row, None) is not None:
            self._host[row] = -1
            self._send([row])

    def update(self, rows: Sequence[int], state: RowState) -> dict[int, GrammarError]:
        """Brings the masks of ``rows``, which have grammars, to their next step; what went wrong, by row.

        ``state`` has their drafts. What is in flight for these rows must have been read back.
        """
        if self._executor is None:
            self._executor = LLExecutor(min(os.cpu_count() or 1, MAX_THREADS))
        drafts = self._drafts(rows, state)
        self._host[list(rows)] = -1  # positions that are not written are rejected, whatever they choose
        wanted = [
            (self._matchers[row], row * self._num_positions, drafted)
            for row, drafted in zip(rows, drafts, strict=True)
        ]
        Matcher.fill(self._executor, wanted, self._host.reshape(-1, self._host.shape[2]))
        self._send(rows)
        errors = {row: self._matchers[row].error for row in rows}
        return {row: error for row, error in errors.items() if error is not None}

    def _drafts(self, rows: Sequence[int], state: RowState) -> list[list[int]]:
        if self._num_positions == 1:
            return [[] for _ in rows]
        index = upload(np.array(rows, dtype=np.int64), state.tokens.device)
        table = torch.cat([state.num_drafts[index, None].to(torch.int64), state.tokens[index, 1:]], dim=1)
        return [drafts[:count] for count, *drafts in table.tolist()]

    def _send(self, rows: Sequence[int]) -> None:
        if self.table.device.type != "cpu":
            device = self.table.device
            index = upload(np.array(rows, dtype=np.int64), device)
            self.table.index_copy_(0, index, upload(self._host[list(rows)], device))
