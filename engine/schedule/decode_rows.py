"""Plans decode rows and gives their requests the memory they lack: blocks, or a slot for a boundary state.

Each step in flight adds at least one token and at most ``1 + k`` tokens to a request. The request gets memory
for the maximum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import cast

from engine.request import Request
from engine.row_kinds import PlannedRow, is_decode_row
from engine.schedule.cache_modes import CacheMode
from engine.schedule.capacity import CapacityPlan
from engine.schedule.ownership import Ownership
from engine.schedule.step_plan import StepPlan


class DecodeRows:
    """Plans decode rows one by one."""

    def __init__(
        self,
        owned: Ownership,
        plan: CapacityPlan,
        mode: CacheMode,
        num_positions: int,
        *,
        num_ahead: int,
    ) -> None:
        """``num_ahead``: tokens for which a row gets blocks ahead if there are plenty, because only the first
        step of a burst is planned (:mod:`engine.step.burst`)."""
        self._owned = owned
        self._plan = plan
        self._mode = mode
        self._num_positions = num_positions
        self._num_ahead = num_ahead

    def is_next(self, request: Request) -> bool:
        """Whether the request's next row is a decode row: N-1 tokens are computed or in flight.

        False if the request is at its end, or if it still waits for the masks of its grammar.
        """
        if request.awaits_masks:
            return False
        if request.is_prompt_planned and not request.prefill_only:
            return request.num_planned < request.max_total_tokens
        num_new, num_before = request.plannable - request.num_planned, request.num_planned
        return is_decode_row(num_new=num_new, num_before=num_before, chunks_until=request.chunks_until)

    def restless(self, requests: Iterable[Request]) -> list[Request]:
        """Returns the requests whose next row, or one of the next rows of a burst, is not surely calm. This
        one look at all requests is all that calm requests cost."""
        more, ahead = self._num_positions - 1, self._num_ahead
        return [
            request
            for request in requests
            if request.num_planned + request.num_in_flight * more + ahead > request.calm_until
            or request.follower is not None
        ]

    def in_order(
        self, requests: Collection[Request], planned: Mapping[Request, PlannedRow | None]
    ) -> tuple[list[PlannedRow], list[PlannedRow]]:
        """Returns the rows of ``requests``, in their order, and the planned ones among them.

        The requests that are not in ``planned`` are calm. None: the request has no row in this step.
        """
        new, no_boundaries = tuple.__new__, ()  # PlannedRow(…) takes three times as long
        rows = [
            planned[request]
            if request in planned
            else new(PlannedRow, (request, request.num_planned, 1, no_boundaries))
            for request in requests
        ]
        if not planned:
            return cast(list[PlannedRow], rows), []
        of_requests = [row for row in rows if row is not None]
        return of_requests, [row for row in of_requests if row.request in planned]

    def is_calm(self, request: Request) -> bool:
        """Whether the request's next row is a decode row for which it already has all memory and masks."""
        most = request.num_planned + request.num_in_flight * (self._num_positions - 1)
        return most <= request.calm_until and not request.awaits_masks

    def num_calm_steps(self, plan: StepPlan) -> int:
        """Returns for how many steps the plan's rows need nothing of the host, if each gains what it can."""
        if plan.prefill_rows:
            return 1
        left = [row.request.calm_until - self._most_computed(row.request) for row in plan.decode_rows]
        return 1 + max(0, min(left) // self._num_positions)

    def num_missing_blocks(self, request: Request) -> int:
        """Returns the number of blocks that the request lacks for its next row."""
        return self._owned.num_missing_blocks(request, self._reach(request, self._most_computed(request) + 1))

    def plan(self, request: Request) -> PlannedRow:
        """Plans the next row. The caller has made room for the blocks that the request lacks."""
        most = self._most_computed(request)
        self._owned.grow(request, self._reach(request, most + 1))
        row = self.plan_as_is(request, most)
        request.calm_until = self._calm_until(request, most)
        self._look_ahead(request, most)
        return row

    def plan_calm(self, request: Request) -> PlannedRow:
        """Plans the next row of a calm request that may not stay calm for a whole burst."""
        self._look_ahead(request, self._most_computed(request))
        return PlannedRow(request, request.num_planned, 1)

    def _look_ahead(self, request: Request, most_computed: int) -> None:
        """Gives a calm request the blocks for a burst, if a quarter of all blocks is free: so hardly any
        request lacks them before this one needs them."""
        if not self._num_ahead or request.calm_until < most_computed:
            return
        reach = self._reach(request, most_computed + 1 + self._num_ahead)
        missing = self._owned.num_missing_blocks(request, reach)
        if missing and 4 * self._owned.cache.num_available_blocks > self._plan.num_blocks:
            self._owned.grow(request, reach)
            request.calm_until = self._calm_until(request, most_computed)

    def plan_admitted(self, request: Request) -> PlannedRow:
        """Plans the first row of a request that has just been given the blocks of its tokens."""
        most = self._most_computed(request)
        self.grow_if_room(request, most + 1)
        return self.plan_as_is(request, most)

    def plan_as_is(self, request: Request, most_computed: int) -> PlannedRow:
        """Plans a row with the blocks that its request has.

        At most ``most_computed`` tokens are computed before the row.
        """
        # Within the prompt the row computes one token. It must not take a boundary after this token, because
        # a chunk may compute the next tokens, and a chunk would not write the state of that boundary.
        num_new = self._num_positions if request.is_prompt_planned else 1
        boundary = self._owned.decode_boundary(request, most_computed, num_new)
        return PlannedRow(request, request.num_planned, 1, boundary)

    def grow_if_room(self, request: Request, num_tokens: int) -> None:
        """Gives a request, if there is room, the blocks for a step that surely computes up to ``num_tokens``.

        Without these blocks the drafts are worse, but that is no reason to preempt another request.
        """
        reach = self._reach(request, num_tokens)
        if self._owned.num_missing_blocks(request, reach) <= self._owned.cache.num_available_blocks:
            self._owned.grow(request, reach)

    def _most_computed(self, request: Request) -> int:
        """Returns the maximum number of tokens that are computed once all steps in flight have landed.

        Within the prompt the number is exact.
        """
        num_uncertain = min(request.num_in_flight, max(0, request.num_planned - request.num_given))
        return request.num_planned + num_uncertain * (self._num_positions - 1)

    def _reach(self, request: Request, num_tokens: int) -> int:
        """Returns for how many tokens a step needs blocks if it surely computes up to ``num_tokens``.

        All k drafts may be accepted, and drafting then writes the KV of k tokens after them.
        """
        return min(num_tokens + 2 * (self._num_positions - 1), request.max_total_tokens)

    def _calm_until(self, request: Request, most_computed: int) -> int:
        """Computes :attr:`Request.calm_until`."""
        if request.memory.boundary is not None or not request.is_prompt_planned or request.prefill_only:
            return -1
        until = request.max_total_tokens - 1
        num_held = len(request.memory.block_ids)
        if num_held < self._plan.blocks_for(request.max_total_tokens):
            until = min(until, num_held * self._plan.block_size - 1 - 2 * (self._num_positions - 1))
        next_kept = self._mode.next_kept(request, most_computed)
        return until if next_kept is None else min(until, next_kept - self._num_positions - 1)
