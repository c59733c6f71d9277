"""The persistent tensors that a decode step reads, padded per request to a captured batch size.

A decode-only batch is uniform: every row has ``T`` positions. Its tensors live at fixed addresses, so that a
graph captured over them can be replayed with other rows. They are padded by *rows*, never by tokens: a
buffer sized for tokens is wrong once each row has several (vllm 39809). Every row up to the captured size
is written in every step, real or padding, on host and device: no row of an earlier step survives, and a
dummy step, padding alone, can touch nothing but the null entries (vllm 37728).

Off GPU the same buffers are driven eagerly, so padding faults show on a CPU as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, DecodeRows
from engine.index_pool import NULL_INDEX
from engine.row_table import RowTable
from engine.rows import PlannedRow


def capture_sizes(max_rows: int) -> list[int]:
    """Batch sizes that graphs are captured for, ascending, the last one ``max_rows`` itself."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True)
class _Buffer:
    """One tensor and the host memory it is filled from; on a CPU both are the same bytes."""

    host: NDArray[Any]
    device: torch.Tensor

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Buffer:
        staging = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        target = staging if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        return cls(staging.numpy(), target)

    def upload(self, num_rows: int) -> torch.Tensor:
        """The first ``num_rows`` rows on the device, at the address where they always are."""
        view = self.device[:num_rows]
        if self.device.device.type != "cpu":
            view.copy_(torch.from_numpy(self.host[:num_rows]), non_blocking=True)
        return view


class StepBuffers:
    """Decode rows of up to ``max_rows`` requests with ``T`` positions each.

    | buffer | shape | in a padding row |
    |---|---|---|
    | input ids, positions, slot mapping | ``[R, T]`` | 0 |
    | sequence lengths, slots to read | ``[R]`` | 0 |
    | slots to write | ``[R, T]`` | 0, the null slot |
    | block table | ``[R, columns]`` | 0, the null block |
    """

    def __init__(
        self, *, max_rows: int, num_positions: int, num_columns: int, block_size: int, device: torch.device
    ) -> None:
        self._sizes = capture_sizes(max_rows)
        self._num_positions = num_positions
        self._block_size = block_size
        self._device = device

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> _Buffer:
            return _Buffer.make((max_rows, *shape), dtype, device)

        self.input_ids = make(num_positions, dtype=torch.int64)
        self.positions = make(num_positions, dtype=torch.int64)
        self.slot_mapping = make(num_positions, dtype=torch.int64)
        self.seq_lens = make()
        self.read_slots = make()
        self.write_slots = make(num_positions)
        self.block_table = make(num_columns)

    def load(self, planned: list[PlannedRow], rows: RowTable) -> Batch:
        """The batch of these rows, padded to the next captured size. Samples are taken where rows sample."""
        num_real = len(planned)
        num_rows = self._captured(num_real)
        self._fill(planned, rows)
        self._clear(num_real, num_rows)
        samples = np.flatnonzero([row.samples for row in planned]) * self._num_positions
        return self._batch(num_rows, samples)

    def padding(self, num_rows: int) -> Batch:
        """A batch of padding rows alone: it writes nothing but the null entries."""
        num_rows = self._captured(num_rows)
        self._clear(0, num_rows)
        return self._batch(num_rows, np.empty(0))

    def _captured(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def _batch(self, num_rows: int, samples: NDArray[Any]) -> Batch:
        return Batch(
            input_ids=self.input_ids.upload(num_rows).view(-1),
            positions=self.positions.upload(num_rows).view(-1),
            slot_mapping=self.slot_mapping.upload(num_rows).view(-1),
            decode=DecodeRows(
                num_rows=num_rows,
                num_positions=self._num_positions,
                seq_lens=self.seq_lens.upload(num_rows),
                block_table=self.block_table.upload(num_rows),
                read_slots=self.read_slots.upload(num_rows),
                write_slots=self.write_slots.upload(num_rows),
                max_seq_len=int(self.seq_lens.host[:num_rows].max()),
            ),
            prefill=None,
            logits_indices=torch.from_numpy(samples.astype(np.int64)).to(self._device),
        )

    def _fill(self, planned: list[PlannedRow], rows: RowTable) -> None:
        num = len(planned)
        table_rows = np.array([row.request.row for row in planned], dtype=np.int64)
        before = np.array([row.num_before for row in planned], dtype=np.int64)
        table = rows.block_table[table_rows]
        blocks = table[np.arange(num), before // self._block_size].astype(np.int64)
        self.input_ids.host[:num, 0] = [row.request.tokens[row.num_before] for row in planned]
        self.positions.host[:num, 0] = before
        self.slot_mapping.host[:num, 0] = blocks * self._block_size + before % self._block_size
        self.seq_lens.host[:num] = before + 1
        self.read_slots.host[:num] = [row.request.state_slot for row in planned]
        self.write_slots.host[:num, 0] = [row.request.slot for row in planned]
        self.block_table.host[:num] = table

    def _clear(self, first: int, end: int) -> None:
        """Turns rows ``first`` … ``end - 1`` into padding."""
        for buffer in (self.input_ids, self.positions, self.slot_mapping, self.seq_lens):
            buffer.host[first:end] = 0
        for buffer in (self.read_slots, self.write_slots, self.block_table):
            buffer.host[first:end] = NULL_INDEX
