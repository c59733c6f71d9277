"""The state sanitizer: every step checks that it reads the blocks and the states that it should.

| when | what |
|---|---|
| freed for good | filled with NaN before anyone else may use it |
| before a step | blocks and slots have one owner; each holds the prefix that its reader expects |
| before a step | the bytes of each state are those that were written; rows that nobody owns are clear |
| before a step | the batch's tensors say what the plan says |
| after a step | what was written is tagged and summed; a state behind a rejected draft is nobody's to read |
| preemption, hand-over | blocks and state are compared by checksum on arrival |

A fault in what only one request uses (its state, its row of the table, its copy) ends that request. Where two
parties use the same memory, or the prefix cache serves something damaged, nothing in the pools can be
trusted: that fault is *structural*, its error leaves the step and ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch
from engine.batch_check import BatchCheck
from engine.caches import Caches
from engine.capacity import blocks_for
from engine.checksum import Checksums
from engine.index_pool import NULL_INDEX
from engine.launched_step import RowResult
from engine.owner_check import check_block_owners, check_slot_owners
from engine.poison import Poison
from engine.provenance import BlockTags, PrefixDigest, SlotTag, SlotTags
from engine.request import Request
from engine.row_table import RowTable
from engine.rows import PlannedRow, decode_slots
from engine.scheduler import Scheduler, StepPlan, Swap
from engine.tensor_parallel import ALONE, TensorParallel
from wire.errors import SanitizerError
from wire.handoff import Digests, Ticket


@dataclass(frozen=True)
class _Away:
    """What a preempted request had in the pools."""

    tag: SlotTag
    state_sums: torch.Tensor
    block_sums: torch.Tensor


class Sanitizer:
    """The checks of :class:`engine.checks.Checks`. It owns tags and sums, and writes NaN to the pools."""

    def __init__(
        self, caches: Caches, scheduler: Scheduler, rows: RowTable, tp: TensorParallel = ALONE
    ) -> None:
        self._scheduler = scheduler
        self._tp = tp
        self._rows = rows
        self._block_size = caches.block_size
        self._device = caches.state.device
        self._slots = SlotTags(scheduler.owned.slots)
        self._blocks = BlockTags(scheduler.owned.blocks)
        self._poison = Poison(caches)
        self._checksums = Checksums(caches)
        self._batch_check = BatchCheck(caches.block_size)
        self._state_sums = torch.zeros(
            (caches.num_slots, self._checksums.num_chunks), dtype=torch.int64, device=self._device
        )
        self._prefixes: WeakKeyDictionary[Request, PrefixDigest] = WeakKeyDictionary()
        self._away: dict[str, _Away] = {}

    # --- memory that changes hands ---------------------------------------------------------------

    def vacated(self, plan: StepPlan) -> None:
        for swap in plan.swap_out:
            if not swap.block_ids:  # preempted before its first chunk: it has nothing yet
                continue
            tag = self._slots.last(swap.slot)
            assert tag is not None, "what is preempted has been computed"
            sums = self._state_sums[swap.slot].clone(), self._sum_whole_blocks(swap.block_ids)
            self._away[swap.request_id] = _Away(tag, *sums)
        blocks, slots = self._blocks.epochs.take_freed(), self._slots.epochs.take_freed()
        if blocks:
            self._poison.blocks(self._index(blocks))
        if slots:
            self._poison.slots(self._index(slots))
        if plan.to_transfer and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a peer's bytes must not land before the NaN

    def _return(self, swap: Swap) -> SanitizerError | None:
        """A preempted request is back: its tags come with it, and its bytes have to be the same."""
        request = self._scheduler.running[swap.request_id]
        away = self._away.pop(swap.request_id, None)
        if away is None:
            return None
        self._slots.move(away.tag, swap.slot)
        self._state_sums[swap.slot] = away.state_sums  # compared before the state is read
        self._tag_blocks(request, 0, request.num_computed)
        changed = (self._sum_whole_blocks(swap.block_ids) != away.block_sums).nonzero()
        if len(changed) == 0:
            return None
        block_id = swap.block_ids[int(changed[0])]
        return _error(request, f"block {block_id}", "the bytes it had when it was preempted", "others")

    def received(self, request: Request) -> SanitizerError | None:
        ticket = request.ticket
        assert ticket is not None
        # Early tickets have no digests: on rank 0 the whole one has taken their place by now.
        digests = ticket.digests if isinstance(ticket, Ticket) else None
        first, num_tokens = len(request.nodes), ticket.num_tokens
        slot = request.state_slot
        if self._slots.epochs.is_free[slot] or self._slots.current(slot) is not None:
            raise _error(
                request, f"slot {slot}", "nothing there before the transfer", self._slots.describe(slot)
            )
        if digests is not None:
            found = self._digests(request, first, num_tokens)
            landed = [f"block {block_id}" for block_id in request.block_ids[first : len(digests.blocks)]]
            landed += [f"slot {slot}, {segment}" for segment in self._checksums.segments]
            sent = (*digests.blocks[first:], *digests.state)
            for where, theirs, ours in zip_longest(landed, sent, (*found.blocks, *found.state)):
                if theirs != ours:
                    return _error(request, f"{where} as received", f"checksum {theirs}", str(ours))
        self._tag_blocks(request, first * self._block_size, num_tokens)
        self._slots.write(slot, request, self._prefix_of(request).at(request.tokens, num_tokens), num_tokens)
        self._sum_states([slot])
        return None

    def digests(self, request: Request) -> Digests:
        return self._digests(request, 0, request.num_computed)

    def _digests(self, request: Request, first_block: int, num_tokens: int) -> Digests:
        """Of the request's blocks from ``first_block`` on, as far as ``num_tokens`` go, and of its state."""
        block_ids = request.block_ids[first_block : blocks_for(num_tokens, self._block_size)]
        rest = num_tokens - (first_block + np.arange(len(block_ids))) * self._block_size
        covered = torch.from_numpy(rest.clip(0, self._block_size)).to(self._device)
        blocks = self._checksums.shares_of_blocks(self._index(block_ids), covered)
        sums = self._tp.sum(torch.cat([blocks, self._checksums.shares_of_state(request.state_slot)])).tolist()
        return Digests(tuple(sums[: len(blocks)]), tuple(sums[len(blocks) :]))

    # --- a step ----------------------------------------------------------------------------------

    def inspect(self, plan: StepPlan) -> list[tuple[Request, SanitizerError]]:
        self._check_free_rows()
        faults: dict[Request, SanitizerError] = {}
        for swap in plan.swap_in:
            error = self._return(swap)
            if error is not None:
                faults[self._scheduler.running[swap.request_id]] = error
        self._away = {name: away for name, away in self._away.items() if name in self._scheduler.preempted}
        check_slot_owners(plan.rows, self._slots)
        check_block_owners(plan.rows, self._blocks, self._block_size)
        readers = [(row.request, row.num_before) for row in plan.rows]
        for row in plan.rows:
            error = self._check_table(row.request)
            if error is not None:
                faults.setdefault(row.request, error)
        for request, num_tokens in [*readers, *((r, r.num_computed) for r in plan.prefilled)]:
            if num_tokens > 0 and request not in faults:
                error = self._check_state(request, num_tokens)
                if error is not None:
                    faults[request] = error
                else:
                    self._check_blocks(request, num_tokens)
        whole = [request for request, num_tokens in readers if num_tokens > 0 and request not in faults]
        faults.update(self._check_state_bytes([*whole, *plan.prefilled]))
        return list(faults.items())

    def compare(self, plan: StepPlan, batch: Batch) -> None:
        self._batch_check.check(plan, batch)

    def computed(self, plan: StepPlan, results: Sequence[RowResult]) -> None:
        written: list[int] = []
        for row, result in zip(plan.rows, results, strict=True):
            if row.request.finish_reason is None and result.accepted:
                end = row.num_before + (result.accepted if row.is_decode else row.num_new)
                self._tag_blocks(row.request, row.num_before, end)
                written += self._tag_states(row, end)
        self._sum_states(written)

    def _tag_states(self, row: PlannedRow, end: int) -> list[int]:
        """Slots that hold true states now, up to h(end); those behind rejected drafts hold none."""
        request = row.request
        if row.is_decode:
            slots = decode_slots(row, len(request.slots))
            states = list(enumerate(slots, row.num_before + 1))
        else:
            states = [(b.length, b.slot) for b in row.boundaries if b.length < end] + [(end, row.write_slot)]
        prefix, written = self._prefix_of(request), []
        for length, slot in states:
            if length <= end:
                self._slots.write(slot, request, prefix.at(request.tokens, length), length)
                written.append(slot)
            else:
                self._slots.spoil(slot, request)
        return written

    def _check_free_rows(self) -> None:
        free = np.array(self._scheduler.owned.free_rows, dtype=np.int64)
        left = self._rows.block_table[free] != NULL_INDEX
        num_left = np.array(self._rows.num_blocks)[free]
        if left.any() or num_left.any():
            row = int(free[(left.any(axis=1) | (num_left > 0)).argmax()])
            found = self._rows.block_table[row, : max(1, self._rows.num_blocks[row])].tolist()
            raise SanitizerError(f"row {row} of the block table: nobody owns it, but it still holds {found}")

    def _check_table(self, request: Request) -> SanitizerError | None:
        """The host's block table against the request's own list; blocks of this step may still be missing."""
        num_known = self._rows.num_blocks[request.row]
        table = self._rows.block_table[request.row]
        expected = np.array(request.block_ids, dtype=np.int32)
        if np.array_equal(table[:num_known], expected[:num_known]) and not table[num_known:].any():
            return None
        return _error(
            request,
            f"row {request.row} of the block table",
            f"blocks {expected.tolist()}",
            str(table[: max(num_known, len(expected))].tolist()),
        )

    def _check_state(self, request: Request, num_tokens: int) -> SanitizerError | None:
        slot = request.state_slot
        tag = self._slots.current(slot)
        digest = self._prefix_of(request).at(request.tokens, num_tokens)
        if tag is not None and (tag.digest, tag.num_tokens) == (digest, num_tokens):
            return None
        expected = f"h({num_tokens}), prefix {digest:016x}"
        error = _error(request, f"slot {slot}", expected, self._slots.describe(slot))
        if tag is None or tag.writer != request.request_id or request.read_state is not None:
            raise error
        return error

    def _check_blocks(self, request: Request, num_tokens: int) -> None:
        digests = self._prefix_of(request).over_blocks(request.tokens, num_tokens)
        block_ids = np.array(request.block_ids[: len(digests)], dtype=np.int64)
        lengths = self._lengths(0, num_tokens)
        right = self._blocks.matches(block_ids, digests, lengths)
        if not right.all():
            i = int(np.flatnonzero(~right)[0])
            expected = f"a prefix of {lengths[i]} tokens, {int(digests[i]):016x}"
            block_id = int(block_ids[i])
            raise _error(request, f"block {block_id}", expected, self._blocks.describe(block_id))

    def _check_state_bytes(self, requests: Sequence[Request]) -> dict[Request, SanitizerError]:
        """States against the sums taken when they were written; one wait for the device."""
        slots = self._index([request.state_slot for request in requests])
        changed = self._checksums.states(slots) != self._state_sums[slots]
        faults: dict[Request, SanitizerError] = {}
        if not changed.any():
            return faults
        for i, chunk in changed.nonzero().tolist():
            request = requests[i]
            if request not in faults:
                slot, segment = request.state_slot, self._checksums.segment_of(chunk)
                expected = f"{self._slots.describe(slot)} as it was written"
                error = _error(request, f"slot {slot}, {segment}", expected, "other bytes")
                if request.read_state is not None:
                    raise error
                faults[request] = error
        return faults

    # --- tags and sums ---------------------------------------------------------------------------

    def _prefix_of(self, request: Request) -> PrefixDigest:
        prefix = self._prefixes.get(request)
        if prefix is None:
            prefix = self._prefixes[request] = PrefixDigest(self._block_size)
        return prefix

    def _tag_blocks(self, request: Request, start: int, end: int) -> None:
        """Blocks that hold tokens ``start … end - 1`` of a request."""
        first = start // self._block_size
        digests = self._prefix_of(request).over_blocks(request.tokens, end)[first:]
        block_ids = np.array(request.block_ids[first : first + len(digests)], dtype=np.int64)
        self._blocks.write(block_ids, digests, self._lengths(first, end))

    def _lengths(self, first_block: int, num_tokens: int) -> NDArray[np.int64]:
        """Tokens up to the end of what each block holds."""
        ends = np.arange(first_block + 1, blocks_for(num_tokens, self._block_size) + 1) * self._block_size
        return np.minimum(ends, num_tokens)

    def _sum_states(self, slots: list[int]) -> None:
        index = self._index(slots)
        self._state_sums[index] = self._checksums.states(index)

    def _sum_whole_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        index = self._index(block_ids)
        return self._checksums.blocks(index, torch.full_like(index, self._block_size))

    def _index(self, indices: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(indices), dtype=torch.int64, device=self._device)


def _error(request: Request, where: str, expected: str, found: str) -> SanitizerError:
    return SanitizerError(f"request {request.request_id!r}: {where}: expected {expected}; found {found}")
