"""Which tokens the rows of a step may choose, as bits on the device.

A table by rows, like those of :mod:`engine.sampling.sampling_table`: steps gather theirs, so that a graph
reads it at one address. All bits are 1 in rows without a grammar, in cleared ones and in the null row.

What a position may choose depends on the answer and on the drafts before it. So a row with a grammar is
part of a step only when the step before has been read back and the masks have come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.memory.async_copy import upload
from engine.request import Request
from engine.step.row_progress import RowState
from kernels.sampling.token_mask import num_words


class GrammarMasks:
    """Bit masks ``[N + 1, T, W]`` int32 of ``num_rows`` rows and the null row, ``T`` positions each."""

    def __init__(self, num_rows: int, num_positions: int, vocab_size: int, device: torch.device) -> None:
        host = torch.full((num_rows + 1, num_positions, num_words(vocab_size)), -1, dtype=torch.int32)
        self._host = host.numpy()
        self._num_positions = num_positions
        self._rows: set[int] = set()
        """Those with grammars."""
        self._changed: set[int] = set()
        self.table = host.to(device)
        """On a CPU the host's own bytes."""

    def fill(self, request: Request) -> None:
        """A request begins to run in its row, or its masks have come."""
        if request.follower is None:
            return
        row, masks = request.row, request.follower.masks
        self._rows.add(row)
        if masks is not None:
            allowed = masks.reshape(-1, self._host.shape[2])
            self._host[row, : len(allowed)] = allowed
            self._host[row, len(allowed) :] = -1  # those positions are rejected, whatever they choose
            self._changed.add(row)

    def clear(self, row: int) -> None:
        """Nobody is in the row: all tokens are allowed again."""
        if row in self._rows:
            self._rows.discard(row)
            self._host[row] = -1
            self._changed.add(row)

    def send(self) -> None:
        """Brings the device's table to what has been filled and cleared; before a step is launched."""
        rows, self._changed = sorted(self._changed), set()
        device = self.table.device
        if rows and device.type != "cpu":
            index = upload(np.array(rows, dtype=np.int64), device)
            self.table.index_copy_(0, index, upload(self._host[rows], device))

    def drafts(self, rows: Sequence[int], state: RowState) -> list[list[int]]:
        """What each row's next step will try. What is in flight for the rows must have been read back."""
        if self._num_positions == 1:
            return [[] for _ in rows]
        index = upload(np.array(rows, dtype=np.int64), state.tokens.device)
        table = torch.cat([state.num_drafts[index, None].to(torch.int64), state.tokens[index, 1:]], dim=1)
        return [drafts[:count] for count, *drafts in table.tolist()]
