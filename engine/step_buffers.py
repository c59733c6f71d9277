"""The persistent tensors of a step of decode rows, padded per request to a captured batch size.

A decode-only batch is uniform: every row has ``T`` positions. Its tensors live at fixed addresses, so that a
graph captured over them can be replayed with other rows. They are padded by *rows*, never by tokens: a
buffer sized for tokens is wrong once each row has several (vllm 39809). Every row up to the captured size
is written in every step, real or padding, on host and device: no row of an earlier step survives, and a
dummy step, padding alone, can touch nothing but the null entries (vllm 37728).

| buffer | shape | written by | in a padding row |
|---|---|---|---|
| rows | ``[R]`` | host | the null row |
| block table | ``[R, columns]`` | host | 0, the null block |
| slots | ``[R, T]`` | host | 0, the null slot |
| boundary: length, slot | ``[R]`` each | host | 0 |
| forced | ``[R]`` | host | -1 |
| input ids, positions, slot mapping | ``[R, T]`` | the step | 0 |
| sequence lengths, slots to read | ``[R]`` | the step | 0 |
| slots to write | ``[R, T]`` | the step | 0 |
| accepted | ``[R]`` | the step | 0 |
| results | ``[R, T + 3]`` | the step | 0 |

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
from engine.row_state import RowState
from engine.row_table import RowTable
from engine.rows import PlannedRow
from kernels.accept_drafts import AcceptDrafts
from kernels.prepare_rows import PrepareRows

NO_TOKEN = -1
STAGES = 2
"""Host copies of each buffer: one is filled while the copy of the step in flight may still be under way."""


def capture_sizes(max_rows: int) -> list[int]:
    """Batch sizes that graphs are captured for, ascending, the last one ``max_rows`` itself."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True)
class _Buffer:
    """One tensor and the host memory it is filled from; on a CPU both are the same bytes."""

    hosts: tuple[NDArray[Any], ...]
    device: torch.Tensor

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Buffer:
        if device.type == "cpu":
            tensor = torch.zeros(shape, dtype=dtype)
            return cls((tensor.numpy(),) * STAGES, tensor)
        stages = [torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(STAGES)]
        return cls(tuple(stage.numpy() for stage in stages), torch.zeros(shape, dtype=dtype, device=device))

    def upload(self, num_rows: int, stage: int) -> None:
        """The first ``num_rows`` rows to the device, at the address where they always are."""
        if self.device.device.type != "cpu":
            staged = torch.from_numpy(self.hosts[stage][:num_rows])
            self.device[:num_rows].copy_(staged, non_blocking=True)


@dataclass(frozen=True)
class StepViews:
    """The first ``R`` rows of what the host writes, and of what the step leaves."""

    num_rows: int
    rows: torch.Tensor
    forced: torch.Tensor
    block_table: torch.Tensor
    accepted: torch.Tensor
    results: torch.Tensor


class StepBuffers:
    """Decode rows of up to ``rows.num_rows`` requests."""

    def __init__(self, rows: RowTable, state: RowState, *, block_size: int, device: torch.device) -> None:
        num_positions, num_columns = rows.slots.shape[1], rows.block_table.shape[1]
        self._table = rows
        self._sizes = capture_sizes(rows.num_rows)
        self._num_positions = num_positions
        self._stage = 0

        def staged(*shape: int, dtype: torch.dtype = torch.int32) -> _Buffer:
            return _Buffer.make((rows.num_rows, *shape), dtype, device)

        def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((rows.num_rows, *shape), dtype=dtype, device=device)

        self.rows = staged(dtype=torch.int64)
        self.block_table = staged(num_columns)
        self.slots = staged(num_positions)
        self.boundary_len = staged()
        self.boundary_slot = staged()
        self.forced = staged(dtype=torch.int64)
        self.input_ids = made(num_positions, dtype=torch.int64)
        self.positions = made(num_positions, dtype=torch.int64)
        self.slot_mapping = made(num_positions, dtype=torch.int64)
        self.seq_lens = made()
        self.read_slots = made()
        self.write_slots = made(num_positions)
        self.accepted = made()
        self.results = made(num_positions + 3, dtype=torch.int64)
        self._prepare_rows = PrepareRows(
            rows=self.rows.device,
            tokens=state.tokens,
            num_computed=state.num_computed,
            state_slot=state.state_slot,
            active=state.active,
            block_table=self.block_table.device,
            slots=self.slots.device,
            boundary_len=self.boundary_len.device,
            boundary_slot=self.boundary_slot.device,
            input_ids=self.input_ids,
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            seq_lens=self.seq_lens,
            read_slots=self.read_slots,
            write_slots=self.write_slots,
            block_size=block_size,
        )

    @property
    def sizes(self) -> list[int]:
        """Captured batch sizes."""
        return self._sizes

    def captured(self, num_rows: int) -> int:
        """The size that so many rows are padded to."""
        return next(size for size in self._sizes if size >= num_rows)

    def load(self, planned: list[PlannedRow], num_rows: int) -> None:
        """Writes what the host knows of these rows, and padding up to ``num_rows``."""
        self._stage = (self._stage + 1) % STAGES
        self._fill(planned)
        self._clear(len(planned), num_rows)
        for buffer in (self.rows, self.block_table, self.slots):
            buffer.upload(num_rows, self._stage)
        for buffer in (self.boundary_len, self.boundary_slot, self.forced):
            buffer.upload(num_rows, self._stage)

    def views(self, num_rows: int) -> StepViews:
        return StepViews(
            num_rows,
            self.rows.device[:num_rows],
            self.forced.device[:num_rows],
            self.block_table.device[:num_rows],
            self.accepted[:num_rows],
            self.results[:num_rows],
        )

    def prepare(self, num_rows: int, *, max_seq_len: int) -> Batch:
        """The loaded rows' batch: indices and inputs are made on the device, from what the last step left.

        Logits are asked for at every position.
        """
        self._prepare_rows(num_rows)
        return Batch(
            input_ids=self.input_ids[:num_rows].view(-1),
            positions=self.positions[:num_rows].view(-1),
            slot_mapping=self.slot_mapping[:num_rows].view(-1),
            decode=DecodeRows(
                num_rows=num_rows,
                num_positions=self._num_positions,
                seq_lens=self.seq_lens[:num_rows],
                block_table=self.block_table.device[:num_rows],
                read_slots=self.read_slots[:num_rows],
                write_slots=self.write_slots[:num_rows],
                max_seq_len=max_seq_len,
            ),
            prefill=None,
        )

    def accept_drafts(self, state: RowState, stop_ids: torch.Tensor) -> AcceptDrafts:
        """The acceptance of drafts, bound to these buffers."""
        return AcceptDrafts(
            rows=self.rows.device,
            write_slots=self.write_slots,
            forced=self.forced.device,
            tokens=state.tokens,
            num_drafts=state.num_drafts,
            num_computed=state.num_computed,
            state_slot=state.state_slot,
            active=state.active,
            limit=state.limit,
            max_drafts=state.max_drafts,
            stop_ids=stop_ids,
            accepted=self.accepted,
            results=self.results,
        )

    def _fill(self, planned: list[PlannedRow]) -> None:
        if not planned:
            return
        num = len(planned)
        table_rows = np.array([row.request.row for row in planned], dtype=np.int64)
        self._host(self.rows)[:num] = table_rows
        self._host(self.block_table)[:num] = self._table.block_table[table_rows]
        self._host(self.slots)[:num] = self._table.slots[table_rows]
        self._host(self.forced)[:num] = [row.next_token for row in planned]
        lengths, slots = self._host(self.boundary_len), self._host(self.boundary_slot)
        lengths[:num] = 0
        slots[:num] = NULL_INDEX
        for i, row in enumerate(planned):
            if row.boundaries:
                lengths[i], slots[i] = row.boundaries[0].length, row.boundaries[0].slot

    def _clear(self, first: int, end: int) -> None:
        """Turns rows ``first`` … ``end - 1`` into padding."""
        self._host(self.rows)[first:end] = self._table.null_row
        self._host(self.boundary_len)[first:end] = 0
        self._host(self.forced)[first:end] = NO_TOKEN
        for buffer in (self.slots, self.block_table, self.boundary_slot):
            self._host(buffer)[first:end] = NULL_INDEX

    def _host(self, buffer: _Buffer) -> NDArray[Any]:
        return buffer.hosts[self._stage]
