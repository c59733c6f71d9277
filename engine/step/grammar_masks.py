"""The tokens that the rows of a step may choose, as bits on the device.

Like the tables of :mod:`engine.sampling.sampling_table`, this table is indexed by row. Each step gathers the
rows that it needs, so a graph always reads the table at one address. All bits are 1 in rows without a
grammar, in cleared rows and in the null row.

The tokens allowed at a position depend on the answer and on the drafts before the position. So a row with a
grammar joins a step only after its previous step was read back and the new masks have arrived.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.memory.async_copy import upload
from engine.request import Request
from kernels.sampling.token_mask import num_words


class GrammarMasks:
    """Bit masks ``[N + 1, T, W]`` int32 of ``N = num_rows`` rows and the null row.

    A row has ``T`` positions, and a position has ``W`` words of 32 bits: one bit for each token.
    """

    def __init__(self, num_rows: int, num_positions: int, vocab_size: int, device: torch.device) -> None:
        host = torch.full((num_rows + 1, num_positions, num_words(vocab_size)), -1, dtype=torch.int32)
        self._host = host.numpy()
        self._rows: set[int] = set()
        """Rows whose requests have grammars."""
        self._changed: set[int] = set()
        self.table = host.to(device)
        """The device's table. On a CPU it is the host's memory."""

    def fill(self, request: Request) -> None:
        """Write a request's masks into its row, when the request begins to run or new masks have arrived."""
        if request.follower is None:
            return
        row, masks = request.row, request.follower.masks
        self._rows.add(row)
        if masks is not None:
            allowed = masks.reshape(-1, self._host.shape[2])
            self._host[row, : len(allowed)] = allowed
            self._host[row, len(allowed) :] = -1  # these positions are rejected, whichever token they choose
            self._changed.add(row)

    def clear(self, row: int) -> None:
        """Allow all tokens again, after the row's request has left."""
        if row in self._rows:
            self._rows.discard(row)
            self._host[row] = -1
            self._changed.add(row)

    def send(self) -> None:
        """Upload the rows that were filled or cleared. Call it before a step is launched."""
        rows, self._changed = sorted(self._changed), set()
        device = self.table.device
        if rows and device.type != "cpu":
            index = upload(np.array(rows, dtype=np.int64), device)
            self.table.index_copy_(0, index, upload(self._host[rows], device))
