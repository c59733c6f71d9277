"""Turns a step's plan and the row table into tensors. Host arithmetic only: no device is waited for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, DecodeRows, PrefillRows
from engine.capacity import blocks_for
from engine.row_table import RowTable
from engine.rows import PlannedRow
from engine.scheduler import StepPlan
from engine.step_buffers import StepBuffers
from kernels.boundaries import Boundaries


class BatchBuilder:
    """Builds :class:`Batch` on one device; blocks hold ``block_size`` tokens.

    Batches of decode rows alone come in persistent buffers, padded to a captured size; those with prefill
    rows are ragged and made anew.
    """

    def __init__(self, rows: RowTable, *, block_size: int, device: torch.device) -> None:
        self._rows = rows
        num_rows, num_columns = rows.block_table.shape
        self._buffers = StepBuffers(
            max_rows=num_rows,
            num_positions=1,
            num_columns=num_columns,
            block_size=block_size,
            device=device,
        )
        self._block_size = block_size
        self._device = device

    def build(self, plan: StepPlan) -> Batch:
        """The plan's batch. Logits are asked for the last token of every row that samples."""
        planned = plan.rows
        for row in planned:
            if len(row.request.block_ids) != self._rows.num_blocks[row.request.row]:
                self._rows.extend(row.request)
        if not plan.prefill_rows:
            return self._buffers.load(plan.decode_rows, self._rows)
        num_new = np.array([row.num_new for row in planned], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(num_new)))
        positions = _ranges(np.array([row.num_before for row in planned], dtype=np.int64), num_new)
        table_rows = np.array([row.request.row for row in planned], dtype=np.int64)
        blocks = self._rows.block_table[np.repeat(table_rows, num_new), positions // self._block_size]
        input_ids = np.empty(starts[-1], dtype=np.int64)
        for row, start in zip(planned, starts, strict=False):
            tokens = row.request.tokens
            if row.num_new == 1:
                input_ids[start] = tokens[row.num_before]
            else:
                input_ids[start : start + row.num_new] = tokens[row.num_before : row.num_before + row.num_new]
        samples = np.array([row.samples for row in planned], dtype=bool)
        return Batch(
            input_ids=self._upload(input_ids),
            positions=self._upload(positions),
            slot_mapping=self._upload(
                blocks.astype(np.int64) * self._block_size + positions % self._block_size
            ),
            decode=self._decode_rows(plan.decode_rows) if plan.decode_rows else None,
            prefill=self._prefill_rows(plan.prefill_rows) if plan.prefill_rows else None,
            logits_indices=self._upload(starts[1:][samples] - 1),
        )

    def dummy(self, num_rows: int) -> Batch:
        """A step of padding rows alone, as an idle data-parallel rank runs it beside busy ones."""
        return self._buffers.padding(num_rows)

    def _decode_rows(self, planned: list[PlannedRow]) -> DecodeRows:
        table_rows, seq_lens = self._gather(planned)
        read_slots, write_slots = _slots(planned)
        return DecodeRows(
            num_rows=len(planned),
            num_positions=1,
            seq_lens=self._upload(seq_lens),
            block_table=self._upload(self._block_table(table_rows, seq_lens)),
            read_slots=self._upload(read_slots),
            write_slots=self._upload(write_slots[:, None]),
            max_seq_len=int(seq_lens.max()),
        )

    def _prefill_rows(self, planned: list[PlannedRow]) -> PrefillRows:
        table_rows, seq_lens = self._gather(planned)
        num_new = np.array([row.num_new for row in planned], dtype=np.int32)
        cu_seqlens = np.zeros(len(planned) + 1, dtype=np.int32)
        np.cumsum(num_new, out=cu_seqlens[1:])
        read_slots, write_slots = _slots(planned)
        has_initial = np.array([row.num_before > 0 for row in planned], dtype=bool)
        boundaries = _boundaries(
            planned,
            cu_seqlens=torch.from_numpy(cu_seqlens),
            read_slots=torch.from_numpy(read_slots),
            write_slots=torch.from_numpy(write_slots),
            has_initial=torch.from_numpy(has_initial),
        )
        return PrefillRows(
            num_rows=len(planned),
            num_tokens=int(cu_seqlens[-1]),
            cu_seqlens=self._upload(cu_seqlens),
            seq_lens=self._upload(seq_lens),
            block_table=self._upload(self._block_table(table_rows, seq_lens)),
            read_slots=self._upload(read_slots),
            write_slots=self._upload(write_slots),
            has_initial=self._upload(has_initial),
            boundaries=None if boundaries is None else boundaries.map(self._move),
            max_query_len=int(num_new.max()),
            max_seq_len=int(seq_lens.max()),
        )

    def _gather(self, planned: list[PlannedRow]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Row indices and sequence lengths, the new tokens included."""
        table_rows = np.array([row.request.row for row in planned], dtype=np.int64)
        seq_lens = np.array([row.num_before + row.num_new for row in planned], dtype=np.int32)
        return table_rows, seq_lens

    def _block_table(self, table_rows: NDArray[np.int64], seq_lens: NDArray[np.int32]) -> NDArray[np.int32]:
        """As many columns as the longest row uses."""
        columns = blocks_for(int(seq_lens.max()), self._block_size)
        return self._rows.block_table[table_rows, :columns]

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        return self._move(torch.from_numpy(np.ascontiguousarray(array)))

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _slots(planned: list[PlannedRow]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where each row's state is, and where the step leaves it."""
    read_slots = np.array([row.request.state_slot for row in planned], dtype=np.int32)
    write_slots = np.array([row.request.slot for row in planned], dtype=np.int32)
    return read_slots, write_slots


def _boundaries(planned: list[PlannedRow], **rows: torch.Tensor) -> Boundaries | None:
    """On the host; ``rows`` is what :meth:`Boundaries.cut` takes of them."""
    entries = [
        (i, boundary.length - row.num_before, boundary.slot)
        for i, row in enumerate(planned)
        for boundary in row.boundaries
    ]
    if not entries:
        return None
    return Boundaries.cut(*torch.tensor(entries, dtype=torch.int32).T.contiguous(), **rows)


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[s, s + 1, …, s + length - 1]`` of each row, one behind the other."""
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within
