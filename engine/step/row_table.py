"""The memory of each admitted request: its blocks and speculative slots, on the host, one row per request.

A row is filled when its request is admitted and cleared when the request leaves. Steps gather rows by index,
so building a batch copies no block list. A cleared row and the null row, which is the last, hold only null
indices: a step that uses such a row by mistake reads the null entries and no request's state (vllm 37728).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.memory.index_pool import NULL_INDEX
from engine.request import Request


class RowTable:
    """Host tables of ``num_rows`` rows and the null row.

    A row has ``num_columns`` blocks and ``num_positions`` slots. Its blocks suffice for a sequence of maximum
    length and the drafts after its end. If a model keeps no KV, the table of blocks stays null; if it keeps
    no states, the table of slots does. A request with a single slot has it at every position.
    """

    def __init__(self, num_rows: int, num_columns: int, num_positions: int) -> None:
        self.num_rows = num_rows
        self.num_positions = num_positions
        self.block_table = np.full((num_rows + 1, num_columns), NULL_INDEX, dtype=np.int32)
        self.num_blocks = [0] * (num_rows + 1)
        self.slots = np.full((num_rows + 1, num_positions), NULL_INDEX, dtype=np.int32)
        self._new_blocks: list[tuple[int, int, int]] = []
        """Row, first column and end of each stretch of blocks that was written."""
        self._new_slots: set[int] = set()
        """Rows whose slots were written."""

    @property
    def null_row(self) -> int:
        """The row that all padding uses."""
        return self.num_rows

    def fill(self, request: Request) -> None:
        """Write an admitted request's blocks and slots into its row."""
        if request.memory.slots:
            self.slots[request.row] = request.memory.slots
        self._new_slots.add(request.row)
        self.extend(request)

    def extend(self, request: Request) -> None:
        """Write the blocks that a request got after its row was filled, if there are any."""
        row, block_ids = request.row, request.memory.block_ids
        known, count = self.num_blocks[row], len(block_ids)
        if known == count:
            return
        self.block_table[row, known:count] = block_ids[known:]
        self.num_blocks[row] = count
        self._new_blocks.append((row, known, count))

    def places(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], block_size: int
    ) -> NDArray[np.int64]:
        """Return where the KV pool keeps ``positions[i]`` of row ``rows[i]``; 0 if it has no block."""
        columns = np.minimum(positions // block_size, self.block_table.shape[1] - 1)
        blocks = self.block_table[rows, columns].astype(np.int64)
        return np.where(blocks == NULL_INDEX, 0, blocks * block_size + positions % block_size)

    def clear(self, row: int) -> None:
        """Write null indices, so that no trace of the row's request is left."""
        self._new_blocks.append((row, 0, self.num_blocks[row]))
        self.block_table[row] = NULL_INDEX
        self.num_blocks[row] = 0
        self.slots[row] = NULL_INDEX
        self._new_slots.add(row)

    def take_changed(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the cells of the flattened tables, of blocks and of slots, that were written since the last
        call. Some may be named twice."""
        columns, width = self.block_table.shape[1], self.slots.shape[1]
        blocks = [(row * columns + first, row * columns + end) for row, first, end in self._new_blocks]
        slots = [(row * width, (row + 1) * width) for row in sorted(self._new_slots)]
        self._new_blocks.clear()
        self._new_slots.clear()
        return _cells(blocks), _cells(slots)


def _cells(stretches: list[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the numbers of all stretches, each given by its first number and its end."""
    if all(end - first == 1 for first, end in stretches):  # decoding rows get one block at a time
        return np.array([first for first, _ in stretches], dtype=np.int64)
    return np.concatenate([np.arange(first, end, dtype=np.int64) for first, end in stretches])
