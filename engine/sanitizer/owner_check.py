"""Checks that a step's rows share memory only for reading. All faults found here are structural
(:mod:`engine.sanitizer.sanitizer` explains this word), so they are raised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.memory.index_pool import NULL_INDEX
from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.sanitizer.provenance import BlockTags, SlotTags
from engine.schedule.capacity import blocks_for
from wire.errors import SanitizerError


def check_slot_owners(rows: Sequence[PlannedRow], tags: SlotTags) -> None:
    """Checks that each slot that is written has one writer, no other reader and an owner.

    A row may overwrite only states of its own request. Raises :class:`SanitizerError` if a check fails.
    """
    writers: dict[int, Request] = {}
    for row in rows:
        for slot in _written_slots(row):
            if slot in writers:
                names = [writers[slot].request_id, row.request.request_id]
                raise SanitizerError(f"slot {slot}: expected one row to write it; found rows of {names}")
            writers[slot] = row.request
    for row in rows:
        request, read = row.request, row.request.memory.state_slot
        carried_on = {read} if row.num_before > 0 else set()
        if carried_on and writers.get(read, request) is not request:
            writer = writers[read].request_id
            raise _error(request, f"slot {read}", "no other row to write it", f"a row of {writer!r}")
        for slot in {*_written_slots(row), *carried_on}:
            if slot == NULL_INDEX or tags.epochs.is_free[slot]:
                raise _error(
                    request, f"slot {slot}", "a slot that it owns", f"it free: {tags.describe(slot)}"
                )
            if slot not in carried_on and not _is_rewritable(slot, request, tags):
                raise _error(request, f"slot {slot}", "nothing before its first use", tags.describe(slot))


def check_block_owners(
    rows: Sequence[PlannedRow], tags: BlockTags, *, block_size: int, num_positions: int
) -> None:
    """Checks that a block that a row writes is in no other row, has an owner, and is empty at its first use.

    Raises :class:`SanitizerError` if a check fails. Decode rows have ``num_positions`` positions.
    """
    if not rows:
        return
    tables = [np.array(row.request.memory.block_ids, dtype=np.int64) for row in rows]
    block_ids, counts = np.unique(np.concatenate(tables), return_counts=True)
    shared = block_ids[counts > 1]
    for row, table in zip(rows, tables, strict=True):
        request = row.request
        end = row.num_before + num_positions if row.is_decode else row.end
        last = blocks_for(end, block_size)
        written = table[row.num_before // block_size : last]
        begun = table[blocks_for(row.num_before, block_size) : last]
        for block_id in table[(table == NULL_INDEX) | (tags.epochs.is_free[table] == 1)]:
            found = f"it free: {tags.describe(block_id)}"
            raise _error(request, f"block {block_id}", "a block that it owns", found)
        for block_id in written[np.isin(written, shared)] if shared.size else ():
            names = [r.request.request_id for r, t in zip(rows, tables, strict=True) if block_id in t]
            raise SanitizerError(
                f"block {block_id}: expected one row to write it; found it in rows of {names}"
            )
        for block_id in begun[~tags.is_fresh(begun)]:
            raise _error(
                request, f"block {block_id}", "nothing before its first use", tags.describe(block_id)
            )


def _is_rewritable(slot: int, request: Request, tags: SlotTags) -> bool:
    """Whether the slot holds nothing yet, or only a state that this request's own steps left there."""
    tag = tags.current(slot)
    return tag is None or tag.writer == request.request_id


def _written_slots(row: PlannedRow) -> Iterator[int]:
    if row.is_decode:
        yield from row.request.memory.slots
    elif row.write_slot not in [boundary.slot for boundary in row.boundaries]:
        yield row.write_slot
    for boundary in row.boundaries:
        yield boundary.slot


def _error(request: Request, where: str, expected: str, found: str) -> SanitizerError:
    return SanitizerError(f"request {request.request_id!r}: {where}: expected {expected}; found {found}")
