"""The state sanitizer: it checks that every step reads the right blocks and states.

| when | what |
|---|---|
| a block or slot is freed | it is filled with NaN before another request may use it |
| before a step | blocks and slots have one owner; each of them holds the prefix that its reader expects |
| before a step | the bytes of each state are those that were written; table rows without an owner are empty |
| before a step | the batch's tensors agree with the plan |
| after a step | written memory is tagged and summed; a state after a rejected draft may not be read |
| preemption, handoff, host memory | blocks and state are compared by checksum on arrival |

A fault in memory that only one request uses (its state, its row of the table, its copy) ends that request. If
two requests use the same memory, or the prefix cache serves damaged memory, nothing in the pools can be
trusted. Such a fault is *structural*: its error leaves the step and ends the process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.memory.caches import Caches
from engine.memory.index_pool import NULL_INDEX
from engine.models.batch import Batch
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.sanitizer.batch_check import BatchCheck
from engine.sanitizer.checksum import Checksums
from engine.sanitizer.host_watch import HostWatch
from engine.sanitizer.owner_check import check_block_owners
from engine.sanitizer.poison import Poison
from engine.sanitizer.provenance import BlockTags, PrefixDigest
from engine.sanitizer.state_watch import NoStateWatch, SlotWatch, StateAway, StateWatch
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Fork, StepPlan, Swap
from engine.step.launched_step import RowResult
from engine.step.row_table import RowTable
from wire.errors import SanitizerError, TwinfangError
from wire.messages.handoff import Digests, Ticket

DAMAGED_ELSEWHERE = "the request's blocks or state are damaged on another tensor-parallel rank"


@dataclass(frozen=True)
class _Away:
    """Checksums of the state and blocks that a preempted request had in the pools."""

    state: StateAway | None
    block_sums: torch.Tensor


class Sanitizer:
    """Implements :class:`engine.step.checks.Checks`. Owns tags and sums, and writes NaN to the pools."""

    def __init__(
        self, caches: Caches, scheduler: Scheduler, rows: RowTable, tp: TensorParallel = ALONE
    ) -> None:
        self._scheduler = scheduler
        self._tp = tp
        self._rows = rows
        self._block_size = caches.block_size
        self._blocks_for = scheduler.capacity.blocks_for
        self._device = caches.state.device
        self._blocks = BlockTags(scheduler.owned.blocks)
        self._poison = Poison(caches)
        self._checksums = Checksums(caches)
        self._batch_check = BatchCheck(caches.block_size)
        self._prefixes: WeakKeyDictionary[Request, PrefixDigest] = WeakKeyDictionary()
        self._states: StateWatch = NoStateWatch()
        if caches.spec.has_state:
            self._states = SlotWatch(
                caches, scheduler.owned.slots, self._checksums, self._poison, self._prefix_of
            )
        self._away: dict[str, _Away] = {}
        self._in_host = HostWatch(
            self._blocks, self._states, lambda block_ids: self._sum_whole_blocks(block_ids).tolist()
        )

    # --- memory that changes hands ---------------------------------------------------------------

    def vacated(self, plan: StepPlan) -> None:
        for swap in plan.swap_out:
            if not swap.block_ids:  # the request was preempted before its first chunk and has nothing yet
                continue
            self._away[swap.request_id] = _Away(
                self._states.leave(swap.slot, swap.request_id), self._sum_whole_blocks(swap.block_ids)
            )
        for copy in plan.host_copies.demoted:
            self._in_host.demoted(copy)
        blocks = self._blocks.epochs.take_freed()
        if blocks:
            self._poison.blocks(self._index(blocks))
        self._states.spoil_freed()
        if plan.to_transfer and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a peer's bytes must not land before the NaN

    def _fork(self, fork: Fork) -> None:
        """Tags the copies of a computed prompt's last blocks and state."""
        source = fork.source
        for copy in fork.copies:
            request = self._scheduler.running[copy.request_id]
            self._states.come_back(copy.slot, self._states.leave(source.slot, copy.request_id))
            num_shared = len(source.block_ids) - len(copy.block_ids)
            self._tag_blocks(request, num_shared * self._block_size, request.num_computed)
        for name in fork.stored:
            sums = self._sum_whole_blocks(source.block_ids)
            self._away[name] = _Away(self._states.leave(source.slot, name), sums)

    def _return(self, swap: Swap) -> SanitizerError | None:
        """Tags the memory of a preempted request that was resumed. Returns an error if its blocks changed."""
        request = self._scheduler.running[swap.request_id]
        away = self._away.pop(swap.request_id, None)
        if away is None:
            return None
        self._states.come_back(swap.slot, away.state)
        self._tag_blocks(request, 0, request.num_computed)
        changed = (self._sum_whole_blocks(swap.block_ids) != away.block_sums).nonzero()
        if len(changed) == 0:
            return None
        block_id = swap.block_ids[int(changed[0])]
        return _error(request, f"block {block_id}", "the bytes it had when it was preempted", "others")

    def received(self, request: Request) -> TwinfangError | None:
        error = self._received(request)
        faults = {} if error is None else {request: error}
        return dict(self._on_any_rank([request], faults)).get(request)

    def _received(self, request: Request) -> SanitizerError | None:
        ticket = request.ticket
        assert ticket is not None
        # Early tickets have no digests. On rank 0 the whole ticket has replaced the early one by now.
        digests = ticket.digests if isinstance(ticket, Ticket) else None
        first, num_tokens = len(request.memory.nodes), ticket.num_tokens
        self._states.expect_nothing(request)
        if digests is not None:
            found = self._digests(request, first, num_tokens)
            memory = request.memory
            landed = [f"block {block_id}" for block_id in memory.block_ids[first : len(digests.blocks)]]
            landed += [f"slot {memory.state_slot}, {segment}" for segment in self._checksums.segments]
            sent = (*digests.blocks[first:], *digests.state)
            for where, theirs, ours in zip_longest(landed, sent, (*found.blocks, *found.state)):
                if theirs != ours:
                    return _error(request, f"{where} as received", f"checksum {theirs}", str(ours))
        self._tag_blocks(request, first * self._block_size, num_tokens)
        self._states.landed(request, num_tokens)
        return None

    def digests(self, request: Request) -> Digests:
        return self._digests(request, 0, request.num_computed)

    def _digests(self, request: Request, first_block: int, num_tokens: int) -> Digests:
        """Sums the request's state, and its blocks from ``first_block`` up to ``num_tokens`` tokens."""
        block_ids = request.memory.block_ids[first_block : self._blocks_for(num_tokens)]
        rest = num_tokens - (first_block + np.arange(len(block_ids))) * self._block_size
        covered = torch.from_numpy(rest.clip(0, self._block_size)).to(self._device)
        blocks = self._checksums.shares_of_blocks(self._index(block_ids), covered)
        state = self._checksums.shares_of_state(request.memory.state_slot)
        sums = self._tp.sum(torch.cat([blocks, state])).tolist()
        return Digests(tuple(sums[: len(blocks)]), tuple(sums[len(blocks) :]))

    # --- a step ----------------------------------------------------------------------------------

    def inspect(self, plan: StepPlan) -> list[tuple[Request, TwinfangError]]:
        self._check_free_rows()
        for copy in plan.host_copies.promoted:
            self._in_host.promoted(copy)
        for fork in plan.forks:
            self._fork(fork)
        faults: dict[Request, SanitizerError] = {}
        for swap in plan.swap_in:
            error = self._return(swap)
            if error is not None:
                faults[self._scheduler.running[swap.request_id]] = error
        self._away = {name: away for name, away in self._away.items() if name in self._scheduler.preempted}
        self._states.check_owners(plan.rows)
        check_block_owners(
            plan.rows, self._blocks, block_size=self._block_size, num_positions=self._rows.num_positions
        )
        readers = [(row.request, row.num_before) for row in plan.rows]
        for row in plan.rows:
            error = self._check_table(row.request)
            if error is not None:
                faults.setdefault(row.request, error)
        for request, num_tokens in [*readers, *((r, r.num_computed) for r in plan.prefilled)]:
            if num_tokens > 0 and request not in faults:
                error = self._states.check(request, num_tokens)
                if error is not None:
                    faults[request] = error
                else:
                    self._check_blocks(request, num_tokens)
        whole = [request for request, num_tokens in readers if num_tokens > 0 and request not in faults]
        faults.update(self._states.check_bytes([*whole, *plan.prefilled]))
        returned = [self._scheduler.running[swap.request_id] for swap in plan.swap_in]
        planned = [*returned, *(row.request for row in plan.rows), *plan.prefilled]
        return self._on_any_rank(dict.fromkeys(planned), faults)

    def _on_any_rank(
        self, requests: Collection[Request], faults: Mapping[Request, SanitizerError]
    ) -> list[tuple[Request, TwinfangError]]:
        """Returns the requests with damaged blocks or state on any tensor-parallel rank, and their errors."""
        is_damaged = self._tp.any([request in faults for request in requests])
        return [
            (request, faults.get(request) or TwinfangError(DAMAGED_ELSEWHERE))
            for request, damaged in zip(requests, is_damaged, strict=True)
            if damaged
        ]

    def compare(self, plan: StepPlan, batch: Batch) -> None:
        self._batch_check.check(plan, batch)

    def computed(self, plan: StepPlan, results: Sequence[RowResult]) -> None:
        ends: list[tuple[PlannedRow, int]] = []
        for row, result in zip(plan.rows, results, strict=True):
            if row.request.finish_reason is None and result.accepted:
                end = row.num_before + (result.accepted if row.is_decode else row.num_new)
                self._tag_blocks(row.request, row.num_before, end)
                ends.append((row, end))
        self._states.computed(ends, self._rows.num_positions)

    def _check_free_rows(self) -> None:
        free = np.array(self._scheduler.owned.free_rows, dtype=np.int64)
        left = self._rows.block_table[free] != NULL_INDEX
        num_left = np.array(self._rows.num_blocks)[free]
        if left.any() or num_left.any():
            row = int(free[(left.any(axis=1) | (num_left > 0)).argmax()])
            found = self._rows.block_table[row, : max(1, self._rows.num_blocks[row])].tolist()
            raise SanitizerError(f"row {row} of the block table: nobody owns it, but it still holds {found}")

    def _check_table(self, request: Request) -> SanitizerError | None:
        """Compares the host's block table with the request's own list.

        Blocks of this step may still be missing in the table.
        """
        num_known = self._rows.num_blocks[request.row]
        table = self._rows.block_table[request.row]
        expected = np.array(request.memory.block_ids, dtype=np.int32)
        if np.array_equal(table[:num_known], expected[:num_known]) and not table[num_known:].any():
            return None
        return _error(
            request,
            f"row {request.row} of the block table",
            f"blocks {expected.tolist()}",
            str(table[: max(num_known, len(expected))].tolist()),
        )

    def _check_blocks(self, request: Request, num_tokens: int) -> None:
        digests = self._digests_of_blocks(request, num_tokens)
        block_ids = np.array(request.memory.block_ids[: len(digests)], dtype=np.int64)
        lengths = self._lengths(0, num_tokens)
        right = self._blocks.matches(block_ids, digests, lengths)
        if not right.all():
            i = int(np.flatnonzero(~right)[0])
            expected = f"a prefix of {lengths[i]} tokens, {int(digests[i]):016x}"
            block_id = int(block_ids[i])
            raise _error(request, f"block {block_id}", expected, self._blocks.describe(block_id))

    # --- tags and sums ---------------------------------------------------------------------------

    def _prefix_of(self, request: Request) -> PrefixDigest:
        prefix = self._prefixes.get(request)
        if prefix is None:
            prefix = self._prefixes[request] = PrefixDigest(self._block_size)
        return prefix

    def _tag_blocks(self, request: Request, start: int, end: int) -> None:
        """Tags the blocks that hold tokens ``start … end - 1`` of a request."""
        first = start // self._block_size
        digests = self._digests_of_blocks(request, end)[first:]
        block_ids = np.array(request.memory.block_ids[first : first + len(digests)], dtype=np.int64)
        self._blocks.write(block_ids, digests, self._lengths(first, end))

    def _digests_of_blocks(self, request: Request, num_tokens: int) -> NDArray[np.uint64]:
        """Returns the prefix digest at the end of each block that holds any of the first ``num_tokens``
        tokens."""
        digests = self._prefix_of(request).over_blocks(request.tokens, num_tokens)
        return digests[: self._blocks_for(num_tokens)]

    def _lengths(self, first_block: int, num_tokens: int) -> NDArray[np.int64]:
        """Returns, for each block, the number of the request's tokens up to the end of the block's
        contents."""
        ends = np.arange(first_block + 1, self._blocks_for(num_tokens) + 1) * self._block_size
        return np.minimum(ends, num_tokens)

    def _sum_whole_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        index = self._index(block_ids)
        return self._checksums.blocks(index, torch.full_like(index, self._block_size))

    def _index(self, indices: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(indices), dtype=torch.int64, device=self._device)


def _error(request: Request, where: str, expected: str, found: str) -> SanitizerError:
    return SanitizerError(f"request {request.request_id!r}: {where}: expected {expected}; found {found}")
