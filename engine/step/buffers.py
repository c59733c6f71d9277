"""The persistent tensors of a step of decode rows, padded to a captured batch size.

A decode-only batch is uniform: each of its ``R`` rows has ``T = 1 + k`` positions, k of them for drafts. Its
tensors live at fixed addresses, so that a graph captured over them can be replayed with other rows. They are
padded by *rows*, never by tokens: a buffer sized for tokens is wrong once each row has several tokens
(vllm 39809).

If a step's rows differ from those of the step before, every row up to the captured size is written, real or
padding. No row of an earlier step survives, and a dummy step, which is only padding, can touch only the null
entries (vllm 37728). In most steps the rows are those of the step before. Then only cells of the block table
that have changed are written. In either case only these cells and the rows' numbers are uploaded
(:mod:`engine.step.step_table`).

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
| pending tokens, if rows replay | ``[R]`` | the step | 0 |
| accepted | ``[R]`` | the step | 0 |
| results | ``[R, T + 3]`` | the step | 0 |

On a CPU the same buffers are used without graphs, so that tests on a CPU find faults of padding too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.memory.index_pool import NULL_INDEX
from engine.models.batch import Batch, DecodeRows
from engine.row_kinds import PlannedRow
from engine.step.row_progress import RowState
from engine.step.row_table import RowTable
from engine.step.step_table import StepTable
from kernels.replay.kept_inputs import PendingRows
from kernels.speculation.accept_drafts import AcceptDrafts
from kernels.speculation.prepare_rows import PrepareRows

NO_TOKEN = -1
NOWHERE = -1
STAGES = 2
"""Number of host copies of each buffer. One is filled while the other may still be uploaded for the step in
flight."""


def capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture graphs for, in ascending order. The last one is ``max_rows``."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True)
class _Buffer:
    """One tensor and the host memory from which it is filled; on a CPU both are the same bytes."""

    hosts: tuple[NDArray[Any], ...]
    device: torch.Tensor

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Buffer:
        if device.type == "cpu":
            tensor = torch.zeros(shape, dtype=dtype)
            return cls((tensor.numpy(),) * STAGES, tensor)
        stages = [torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(STAGES)]
        return cls(tuple(stage.numpy() for stage in stages), torch.zeros(shape, dtype=dtype, device=device))

    def upload(self, first: int, end: int, stage: int) -> None:
        """Copy rows ``first`` … ``end - 1`` to their fixed address on the device."""
        if self.device.device.type != "cpu":
            staged = torch.from_numpy(self.hosts[stage][first:end])
            self.device[first:end].copy_(staged, non_blocking=True)


@dataclass(frozen=True)
class StepViews:
    """The first ``R`` rows of all buffers.

    The views are kept, because slicing in each step would take longer than the rest of the host's work.
    """

    rows: torch.Tensor
    forced: torch.Tensor
    block_table: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    """``[R * T]``, like input ids and positions."""
    seq_lens: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor
    accepted: torch.Tensor
    results: torch.Tensor
    pending: PendingRows | None
    """None if rows don't replay."""


class StepBuffers:
    """The buffers for decode rows of up to ``rows.num_rows`` requests."""

    def __init__(
        self,
        rows: RowTable,
        state: RowState,
        *,
        block_size: int,
        device: torch.device,
        replays: bool = False,
    ) -> None:
        num_positions = rows.slots.shape[1]
        self._table = rows
        self._pending = state.pending
        self._sizes = capture_sizes(rows.num_rows)
        self._num_positions = num_positions
        self._stage = 0
        self._loaded: tuple[list[int], int] = ([], 0)
        """Table rows and padded size of the last load."""
        self._places = np.full(rows.num_rows + 1, NOWHERE, dtype=np.int64)
        """Place of each table row in the last load; :data:`NOWHERE` if it was not loaded."""
        self._extras_end = 0
        """From this buffer row on, no row has a boundary or a forced token."""
        self._views: dict[int, StepViews] = {}

        def staged(*shape: int, dtype: torch.dtype = torch.int32) -> _Buffer:
            return _Buffer.make((rows.num_rows, *shape), dtype, device)

        def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((rows.num_rows, *shape), dtype=dtype, device=device)

        self.rows = staged(dtype=torch.int64)
        self.block_table = StepTable.make(rows.block_table, rows.num_rows, device)
        self.slots = StepTable.make(rows.slots, rows.num_rows, device)
        self.boundary_len = staged()
        self.boundary_slot = staged()
        self.forced = staged(dtype=torch.int64)
        self.forced.device.fill_(NO_TOKEN)
        self.input_ids = made(num_positions, dtype=torch.int64)
        self.positions = made(num_positions, dtype=torch.int64)
        self.slot_mapping = made(num_positions, dtype=torch.int64)
        self.seq_lens = made()
        self.read_slots = made()
        self.write_slots = made(num_positions)
        self.accepted = made()
        self.results = made(num_positions + 3, dtype=torch.int64)
        self.pending_counts = made() if replays else None
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
        """Return the captured size to which ``num_rows`` rows are padded."""
        return next(size for size in self._sizes if size >= num_rows)

    def load(
        self, planned: list[PlannedRow], num_rows: int, restless: list[PlannedRow] | None = None
    ) -> None:
        """Write the host's values of the planned rows, followed by padding rows up to ``num_rows`` in all.

        Only ``restless`` rows can have a boundary or a forced token; None: all can.
        """
        self._stage = (self._stage + 1) % STAGES
        rows = [row.request.row for row in planned]
        is_arranged = self._loaded == (rows, num_rows)
        for table, cells in zip((self.block_table, self.slots), self._table.take_changed(), strict=True):
            if len(cells):
                table.send(cells, self._places if is_arranged else None)
        if not is_arranged:
            self._loaded = rows, num_rows
            self._arrange(rows, num_rows)
        extras = [
            row for row in (planned if restless is None else restless) if row.boundaries or not row.samples
        ]
        if extras or self._extras_end:
            self._fill_extras(extras, max(num_rows, self._extras_end))
        self._extras_end = num_rows if extras else 0

    def views(self, num_rows: int) -> StepViews:
        views = self._views.get(num_rows)
        if views is None:
            views = self._views[num_rows] = StepViews(
                self.rows.device[:num_rows],
                self.forced.device[:num_rows],
                self.block_table.device[:num_rows],
                self.input_ids[:num_rows].view(-1),
                self.positions[:num_rows].view(-1),
                self.slot_mapping[:num_rows].view(-1),
                self.seq_lens[:num_rows],
                self.read_slots[:num_rows],
                self.write_slots[:num_rows],
                self.accepted[:num_rows],
                self.results[:num_rows],
                self._pending_rows(num_rows),
            )
        return views

    def _pending_rows(self, num_rows: int) -> PendingRows | None:
        if self.pending_counts is None:
            return None
        return PendingRows(
            self.rows.device[:num_rows], self.pending_counts[:num_rows], self.seq_lens[:num_rows]
        )

    def prepare(self, num_rows: int, *, max_seq_len: int) -> Batch:
        """Make the batch of the loaded rows. Logits are computed at every position.

        The device makes indices and inputs from the results of the last step.
        """
        self._prepare_rows(num_rows)
        views = self.views(num_rows)
        if views.pending is not None:
            views.pending.counts.copy_(self._pending[views.rows])
        return Batch(
            input_ids=views.input_ids,
            positions=views.positions,
            slot_mapping=views.slot_mapping,
            decode=DecodeRows(
                num_rows=num_rows,
                num_positions=self._num_positions,
                seq_lens=views.seq_lens,
                block_table=views.block_table,
                read_slots=views.read_slots,
                write_slots=views.write_slots,
                max_seq_len=max_seq_len,
                pending=views.pending,
            ),
            prefill=None,
        )

    def accept_drafts(self, state: RowState, stop_ids: torch.Tensor) -> AcceptDrafts:
        """Make the kernel that accepts drafts, bound to these buffers."""
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

    def _arrange(self, rows: list[int], num_rows: int) -> None:
        """Write the row numbers and the rows' blocks and slots. Padding rows name the table's null row."""
        self._places.fill(NOWHERE)
        self._places[rows] = range(len(rows))
        self._host(self.rows)[:num_rows] = rows + [self._table.null_row] * (num_rows - len(rows))
        self.rows.upload(0, num_rows, self._stage)
        for table in (self.block_table, self.slots):
            table.arrange(self.views(num_rows).rows)

    def _fill_extras(self, extras: list[PlannedRow], end: int) -> None:
        """Write boundaries and forced tokens; clear those of the other rows up to ``end``."""
        lengths, slots = self._host(self.boundary_len), self._host(self.boundary_slot)
        forced = self._host(self.forced)
        lengths[:end], slots[:end], forced[:end] = 0, NULL_INDEX, NO_TOKEN
        for row in extras:
            i = self._places[row.request.row]
            forced[i] = row.next_token
            if row.boundaries:
                lengths[i], slots[i] = row.boundaries[0].length, row.boundaries[0].slot
        for buffer in (self.boundary_len, self.boundary_slot, self.forced):
            buffer.upload(0, end, self._stage)

    def _host(self, buffer: _Buffer) -> NDArray[Any]:
        return buffer.hosts[self._stage]
