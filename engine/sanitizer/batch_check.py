"""Checks a batch's tensors against the plan: computes the expected tensors from the requests, not from
tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.models.batch import Batch, DecodeRows, PrefillRows
from engine.row_kinds import PlannedRow, decode_slots
from engine.schedule.capacity import blocks_for
from engine.schedule.step_plan import StepPlan
from wire.errors import SanitizerError


class BatchCheck:
    """Compares every index by which a step reads or writes memory. The comparison waits for the device."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def check(self, plan: StepPlan, batch: Batch) -> None:
        """Raises :class:`SanitizerError` with both values for the first entry that differs.

        Decode rows after the planned ones must be padding: zeros and null indices everywhere.
        """
        decode, prefill = batch.decode, batch.prefill
        num_decode = 0 if decode is None else decode.num_rows
        num_prefill = 0 if prefill is None else prefill.num_rows
        if num_decode < len(plan.decode_rows) or num_prefill != len(plan.prefill_rows):
            raise SanitizerError(
                f"the plan has {len(plan.decode_rows)} decode and {len(plan.prefill_rows)} prefill rows; "
                f"found a batch of {num_decode} and {num_prefill}"
            )
        if decode is not None:
            self._check_decode(decode, batch, plan.decode_rows)
        if prefill is not None:
            self._check_prefill(prefill, batch, plan.prefill_rows)

    def _check_decode(self, part: DecodeRows, batch: Batch, planned: list[PlannedRow]) -> None:
        """Checks everything but the tokens of drafts, which only the drafter knows."""
        width, split = part.num_positions, batch.num_decode_tokens
        padding = part.num_rows - len(planned)
        positions: list[int] = []
        places: list[int] = []
        written: list[int] = []
        for row in planned:
            own = range(row.num_before, row.num_before + width)
            positions += own
            places += self._places(row, own)
            written += decode_slots(row, width)
        newest = [row.request.tokens[row.num_before] for row in planned]
        _compare("newest tokens", batch.input_ids[:split:width], newest + [0] * padding)
        _compare("positions", batch.positions[:split], positions + [0] * padding * width)
        _compare("slot_mapping", batch.slot_mapping[:split], places + [0] * padding * width)
        _compare("decode write_slots", part.write_slots.reshape(-1), written + [0] * padding * width)
        self._check_rows("decode", part, planned, [row.num_before + width for row in planned])

    def _check_prefill(self, part: PrefillRows, batch: Batch, planned: list[PlannedRow]) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for row in planned:
            own = range(row.num_before, row.end)
            tokens += row.request.tokens[own.start : own.stop]
            positions += own
            places += self._places(row, own)
        split = batch.num_decode_tokens
        _compare("input_ids", batch.input_ids[split:], tokens)
        _compare("positions", batch.positions[split:], positions)
        _compare("slot_mapping", batch.slot_mapping[split:], places)
        _compare("prefill write_slots", part.write_slots, [row.write_slot for row in planned])
        self._check_rows("prefill", part, planned, [row.end for row in planned])
        _check_prefill(part, planned)

    def _places(self, row: PlannedRow, positions: range) -> list[int]:
        """Returns the places of ``positions`` in the KV pool; 0 for a position without a block."""
        blocks, size = row.request.memory.block_ids, self._block_size
        return [blocks[at // size] * size + at % size if at // size < len(blocks) else 0 for at in positions]

    def _check_rows(
        self, kind: str, part: DecodeRows | PrefillRows, planned: list[PlannedRow], lengths: list[int]
    ) -> None:
        padding = [0] * (part.num_rows - len(planned))
        read = [row.request.memory.state_slot for row in planned]
        _compare(f"{kind} read_slots", part.read_slots, read + padding)
        _compare(f"{kind} seq_lens", part.seq_lens, lengths + padding)
        table = part.block_table.cpu()
        for i, row in enumerate(planned):
            block_ids = row.request.memory.block_ids[: blocks_for(lengths[i], self._block_size)]
            name = f"block table of {row.request.request_id!r}"
            _compare(name, table[i, : len(block_ids)], block_ids)
        rest = table[len(planned) :]
        _compare(f"{kind} block table of padding", rest.reshape(-1), [0] * rest.numel())


def _check_prefill(part: PrefillRows, planned: list[PlannedRow]) -> None:
    ends = np.cumsum([0] + [row.num_new for row in planned])
    _compare("cu_seqlens", part.cu_seqlens, ends)
    _compare("has_initial", part.has_initial, [row.num_before > 0 for row in planned])
    boundaries = [
        (i, row.num_before, boundary)
        for i, row in enumerate(planned)
        for boundary in row.boundaries
        if boundary.length < row.end
    ]
    if part.boundaries is None:
        if boundaries:
            raise SanitizerError(f"the plan has {len(boundaries)} boundaries; found a batch without any")
        return
    _compare("boundary rows", part.boundaries.rows, [i for i, _, _ in boundaries])
    offsets = [boundary.length - num_before for _, num_before, boundary in boundaries]
    _compare("boundary offsets", part.boundaries.offsets, offsets)
    _compare("boundary slots", part.boundaries.slots, [boundary.slot for _, _, boundary in boundaries])


def _compare(name: str, found: Tensor, expected: Sequence[int] | NDArray[np.int64]) -> None:
    values, wanted = found.cpu().numpy(), np.asarray(expected)
    if values.shape != wanted.shape:
        raise SanitizerError(f"the batch's {name}: expected {wanted.shape} entries; found {values.shape}")
    if not np.array_equal(values, wanted):
        at = int(np.flatnonzero(values != wanted)[0])
        raise SanitizerError(f"the batch's {name}[{at}]: expected {wanted[at]}; found {values[at]}")
