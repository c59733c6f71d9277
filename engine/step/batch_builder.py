"""Turns a step's plan, which the host has made, into tensors. Never waits for a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.batch import Batch, PrefillRows
from engine.row_kinds import PlannedRow
from engine.sampling.sampling_table import SamplingNeeds
from engine.schedule.capacity import blocks_for
from engine.schedule.step_plan import StepPlan
from engine.step.buffers import StepBuffers
from engine.step.program import PrefillEnds, SamplingEnds, Step
from engine.step.row_table import RowTable
from kernels.ssm.boundaries import Boundaries


class BatchBuilder:
    """Builds steps.

    The tensors of decode rows are in the step buffers. Those of prefill rows, whose lengths differ, are made
    for each step.
    """

    def __init__(
        self, rows: RowTable, buffers: StepBuffers, *, block_size: int, device: torch.device
    ) -> None:
        self._rows = rows
        self._buffers = buffers
        self._block_size = block_size
        self._device = device

    def decode_step(self, num_rows: int, needs: SamplingNeeds, *, max_seq_len: int, samples: bool) -> Step:
        """Build the step of the ``num_rows`` decode rows loaded in the buffers, padding included."""
        batch = self._buffers.prepare(num_rows, max_seq_len=max_seq_len)
        views = self._buffers.views(num_rows)
        return Step(
            batch=batch,
            rows=views.rows,
            forced=views.forced,
            write_slots=views.write_slots,
            block_table=views.block_table,
            accepted=views.accepted,
            results=views.results,
            samples=samples,
            reads_hidden=True,
            needs=needs,
            ends=None,
        )

    def mixed_step(
        self, plan: StepPlan, needs: SamplingNeeds, *, max_seq_len: int, reads_hidden: bool
    ) -> Step:
        """Build the plan's step: the decode rows that the buffers hold, followed by the prefill rows."""
        num_decode = len(plan.decode_rows)
        decode = self._buffers.prepare(num_decode, max_seq_len=max_seq_len) if num_decode else None
        prefill = self._prefill_batch(plan.prefill_rows)
        views = self._buffers.views(num_decode)
        planned = plan.prefill_rows
        rows = np.array([row.request.row for row in planned], dtype=np.int64)
        write_slots = np.zeros((len(planned), self._rows.slots.shape[1]), dtype=np.int32)
        write_slots[:, 0] = [row.write_slot for row in planned]
        forced = np.array([row.next_token for row in planned], dtype=np.int64)
        num_rows = num_decode + len(planned)
        return Step(
            batch=prefill if decode is None else _join(decode, prefill),
            rows=_behind(views.rows, self._upload(rows)),
            forced=_behind(views.forced, self._upload(forced)),
            write_slots=_behind(views.write_slots, self._upload(write_slots)),
            block_table=_behind(views.block_table, self._upload(self._rows.block_table[rows])),
            accepted=torch.zeros(num_rows, dtype=torch.int32, device=self._device),
            results=torch.zeros((num_rows, views.results.shape[1]), dtype=torch.int64, device=self._device),
            samples=any(row.samples for row in plan.rows),
            reads_hidden=reads_hidden,
            needs=needs,
            ends=self._prefill_ends(planned, num_decode, 0 if decode is None else decode.num_decode_tokens),
        )

    def _prefill_ends(
        self, planned: list[PlannedRow], num_decode: int, num_decode_tokens: int
    ) -> PrefillEnds:
        last_tokens = np.cumsum([row.num_new for row in planned]) - 1 + num_decode_tokens
        sampling = [i for i, row in enumerate(planned) if row.samples]
        sampling_rows = [planned[i] for i in sampling]
        return PrefillEnds(
            last_tokens=self._upload(last_tokens),
            last_positions=self._upload(np.array([row.end - 1 for row in planned], dtype=np.int32)),
            sampling=SamplingEnds(
                places=self._integers([num_decode + i for i in sampling]),
                rows=self._integers([row.request.row for row in sampling_rows]),
                tokens=self._upload(last_tokens[sampling]),
                positions=self._integers([[row.end - 1] for row in sampling_rows]),
                input_ids=self._integers([[row.request.tokens[row.end - 1]] for row in sampling_rows]),
            ),
            next_ids=self._upload(_tokens(planned, 1)),
        )

    def _prefill_batch(self, planned: list[PlannedRow]) -> Batch:
        num_new = np.array([row.num_new for row in planned], dtype=np.int64)
        positions = _ranges(np.array([row.num_before for row in planned], dtype=np.int64), num_new)
        rows = np.array([row.request.row for row in planned], dtype=np.int64)
        places = self._rows.places(np.repeat(rows, num_new), positions, self._block_size)
        return Batch(
            input_ids=self._upload(_tokens(planned, 0)),
            positions=self._upload(positions),
            slot_mapping=self._upload(places),
            decode=None,
            prefill=self._prefill_rows(planned),
        )

    def _prefill_rows(self, planned: list[PlannedRow]) -> PrefillRows:
        table_rows = np.array([row.request.row for row in planned], dtype=np.int64)
        seq_lens = np.array([row.end for row in planned], dtype=np.int32)
        num_new = np.array([row.num_new for row in planned], dtype=np.int32)
        cu_seqlens = np.zeros(len(planned) + 1, dtype=np.int32)
        np.cumsum(num_new, out=cu_seqlens[1:])
        read_slots = np.array([row.request.next_state_slot for row in planned], dtype=np.int32)
        write_slots = np.array([row.write_slot for row in planned], dtype=np.int32)
        num_before = np.array([row.num_before for row in planned], dtype=np.int32)
        has_initial = num_before > 0
        boundaries = _boundaries(
            planned,
            cu_seqlens=torch.from_numpy(cu_seqlens),
            read_slots=torch.from_numpy(read_slots),
            write_slots=torch.from_numpy(write_slots),
            has_initial=torch.from_numpy(has_initial),
            num_before=torch.from_numpy(num_before),
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
            num_before=self._upload(num_before),
            boundaries=None if boundaries is None else boundaries.map(self._move),
            max_query_len=int(num_new.max()),
            max_seq_len=int(seq_lens.max()),
        )

    def _block_table(self, table_rows: NDArray[np.int64], seq_lens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the rows of the block table, with as many columns as the longest row uses."""
        columns = blocks_for(int(seq_lens.max()), self._block_size)
        return self._rows.block_table[table_rows, :columns]

    def _integers(self, values: list[Any]) -> torch.Tensor:
        return self._upload(np.array(values, dtype=np.int64))

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        return self._move(torch.from_numpy(np.ascontiguousarray(array)))

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _behind(decode: torch.Tensor, prefill: torch.Tensor) -> torch.Tensor:
    """Return the prefill rows' values behind those of the decode rows. Most prompts find no decode row."""
    return torch.cat([decode, prefill]) if len(decode) else prefill


def _join(decode: Batch, prefill: Batch) -> Batch:
    """Join the decode rows and the prefill rows into one batch, decode tokens first."""
    return replace(
        prefill,
        input_ids=torch.cat([decode.input_ids, prefill.input_ids]),
        positions=torch.cat([decode.positions, prefill.positions]),
        slot_mapping=torch.cat([decode.slot_mapping, prefill.slot_mapping]),
        decode=decode.decode,
    )


def _tokens(planned: list[PlannedRow], ahead: int) -> NDArray[np.int64]:
    """Return, for each new token of the rows, the token ``ahead`` places after it.

    The value is 0 if that token is not known yet.
    """
    tokens: list[int] = []
    for row in planned:
        part = row.request.tokens[row.num_before + ahead : row.end + ahead]
        tokens += part
        tokens += [0] * (row.num_new - len(part))
    return np.array(tokens, dtype=np.int64)


def _boundaries(planned: list[PlannedRow], **rows: torch.Tensor) -> Boundaries | None:
    """Build the boundaries inside the rows, on the host; None if there are none.

    ``rows`` are further arguments of :meth:`Boundaries.cut`.
    """
    entries = [
        (i, boundary.length - row.num_before, boundary.slot)
        for i, row in enumerate(planned)
        for boundary in row.boundaries
        if boundary.length < row.end  # the state at the row's end is in write_slots already
    ]
    if not entries:
        return None
    return Boundaries.cut(*torch.tensor(entries, dtype=torch.int32).T.contiguous(), **rows)


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the numbers ``s, s + 1, …, s + length - 1`` of all rows, where ``s`` is a row's start."""
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    ranges: NDArray[np.int64] = np.repeat(starts, lengths) + within
    return ranges
