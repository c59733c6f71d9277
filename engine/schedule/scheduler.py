"""Decides on the host which requests are admitted, preempted and resumed, and what each step computes.

No tensors, no clocks, no I/O. Steps may be planned while the last one is still in flight: a prompt's progress
is known when it is planned, a decoding request's progress only within bounds, so the request gets memory for
the upper bound. Requests are admitted first come, first served, with the blocks of their prompt; they get
further blocks one by one as they decode. When blocks run out the youngest running request is preempted: its
blocks and state move to host memory and come back, exactly as they were, when there is room. The oldest
request is never preempted for another, so every admitted request runs to its end.

Each of several clients gets a fair share (:mod:`engine.schedule.fair_share`): requests of the client with the
smallest share are admitted first. Requests of the client with the largest share are preempted first, for
blocks or to give a row to another client.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import chain, islice

from engine.files.file_tier import FileTier
from engine.memory.cache_formats import ExactCuts
from engine.memory.eviction import EvictionPolicy
from engine.memory.host_tier import HostTier
from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.schedule.cache_modes import CacheMode
from engine.schedule.capacity import CapacityPlan
from engine.schedule.decode_rows import DecodeRows
from engine.schedule.fair_share import PAUSE_STEPS, FairShares, have_several_clients
from engine.schedule.forks import Forks
from engine.schedule.ownership import Ownership
from engine.schedule.prompt_chunks import PromptChunks
from engine.schedule.step_plan import Fork, StepPlan, Swap
from wire.errors import ContextLengthError, InvalidRequestError

SHORT_PROMPT_STEPS = 16
"""Steps between two steps in which prompts of one token begin. A step with a prompt runs outside of the
graphs and takes three times as long for all rows: a client with many such prompts must not slow down every
step."""
FEW_ROWS = 4
"""With at most this many rows, prompts of one token need not wait: hardly any row is slowed down."""


class Scheduler:
    """Owns the queues. A request is in exactly one of them:

    ``waiting`` → [``transferring`` →] ``running`` ⇄ ``preempted`` → gone, or ``held`` (its blocks and state
    are leased) or ``quarantined`` (ended, but late bytes may still land) → gone. Choices that start from
    another request's state first wait in ``forks``.
    """

    def __init__(
        self,
        plan: CapacityPlan,
        mode: CacheMode,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        num_positions: int = 1,
        fingerprint: str = "",
        cuts: ExactCuts | None = None,
        long_prefill_threshold: int | None = None,
        joined_prompt_tokens: int | None = None,
        burst_steps: int = 1,
        policy: EvictionPolicy | None = None,
        tier: HostTier | None = None,
        files: FileTier | None = None,
    ) -> None:
        """``policy`` decides what the prefix cache gives up; None: what was used least recently. ``tier``
        keeps in host memory what it gives up, and ``files`` lie behind that; None: nothing is kept.
        ``long_prefill_threshold`` is ``max_batch_tokens`` unless given. None of ``joined_prompt_tokens``:
        prompts share a step whatever their length. Decode rows get blocks for ``burst_steps`` steps."""
        self.capacity = plan
        self._cuts = cuts
        self._num_positions = num_positions
        self._mode = mode
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self.owned = Ownership(
            *(plan, mode),
            max_num_seqs=max_num_seqs,
            num_positions=num_positions,
            fingerprint=fingerprint,
            policy=policy,
            tier=tier,
            files=files,
        )
        ahead = (burst_steps - 1) * num_positions
        self.decode = DecodeRows(self.owned, plan, mode, num_positions, num_ahead=ahead)
        self._chunks = PromptChunks(
            *(self.owned, mode, self.decode),
            cuts=cuts,
            num_positions=num_positions,
            long_threshold=long_prefill_threshold or max_batch_tokens,
            joined_tokens=joined_prompt_tokens or math.inf,
        )
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.transferring: dict[str, Request] = {}
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.preempted: OrderedDict[str, Request] = OrderedDict()
        self.forks = Forks()
        self._active = (self.running, self.transferring, self.preempted, self.waiting)
        self.held: dict[str, Request] = {}
        self.quarantined: dict[str, Request] = {}
        self.num_preemptions = 0
        """Preemptions because blocks ran out."""
        self.num_given_rows = 0
        """Preemptions to give a row to another client's request."""
        self._left_rows: list[int] = []
        self._unplaced: Request | None = None
        """The request that was to be admitted next in the last plan, but found no room."""
        self._step = 0
        """Number of plans so far."""
        self._last_short_prompt = -SHORT_PROMPT_STEPS
        """The last step in which prompts of one token began."""

    # --- events ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises :class:`InvalidRequestError` if its id is in use, or if it exceeds the context.
        """
        for one in (request, *request.forks):
            name = one.request_id
            if self.find_active(name) or name in self.held or name in self.quarantined:
                raise InvalidRequestError(f"request id {name!r} is in use; choose another")
        limit = self.capacity.max_model_len
        answer = 0 if request.params is None else request.params.max_tokens
        if request.num_prompt + answer > limit:
            raise ContextLengthError(
                f"the prompt's {request.num_prompt} tokens and an answer of up to {answer} exceed the "
                f"context of {limit} tokens; shorten the prompt or lower max_tokens"
            )
        if self._cuts is not None:
            request.chunks_until = request.num_given - 1
        self.waiting[request.request_id] = request
        self.forks.add(request)
        self.owned.came(request)

    def transferred(self, request: Request, num_tokens: int) -> None:
        """Lets a request run from the next step on: its handed-over blocks and h(num_tokens) have landed."""
        del self.transferring[request.request_id]
        request.num_computed = request.num_planned = num_tokens
        if request.prefill_only:
            request.measured.num_cached = num_tokens
        self.owned.enter(request)
        self.running[request.request_id] = request

    def launched(self, plan: StepPlan, num_steps: int = 1) -> None:
        """Notes that the plan's rows are being computed; further steps may be planned meanwhile."""
        for request, _, num_new, _ in plan.rows:
            request.num_planned += num_new * num_steps
            request.num_in_flight += num_steps
        for row in plan.eventful_rows:
            if row.end < row.request.num_given:  # else no further chunk reads the slot
                row.request.planned_slot = row.write_slot

    def landed(
        self, row: PlannedRow, num_accepted: int, *, num_steps: int = 1, newest: int | None = None
    ) -> None:
        """Notes that a launched row has been read back. ``num_accepted`` positions of a decode row were
        accepted, ``newest`` of them in the last of the steps that accepted any; None: all."""
        row.request.num_in_flight -= num_steps
        if row.is_decode:
            row.request.num_planned += num_accepted - num_steps
        self.owned.computed(row, num_accepted, num_accepted if newest is None else newest)

    def discard(self, plan: StepPlan, requests: Collection[Request]) -> StepPlan:
        """Ends requests before their planned rows are computed. Returns the plan without them."""
        for row in plan.rows:
            if row.request in requests:
                self.owned.give_up(row)
        for request in requests:
            self.finish(request)
        return plan.without(requests)

    def hold(self, request: Request) -> None:
        """Holds an ended request: frees its row; its blocks and state stay leased until :meth:`release`."""
        del self.running[request.request_id]
        self._leave_row(request)
        self.owned.keep_state_alone(request)
        self.held[request.request_id] = request

    def release(self, request_id: str) -> None:
        """Frees the blocks and state of a held request, or the blocks and slot of a quarantined one."""
        request = self.held.pop(request_id, None) or self.quarantined.pop(request_id, None)
        if request is not None:
            self.owned.free_memory(request)

    def finish(self, request: Request) -> None:
        """Removes the request from whatever queue it is in and frees everything it owns."""
        self.forks.drop(request)
        for queue in (*self._active, self.held):
            if queue.pop(request.request_id, None) is not None:
                break
        self._leave_row(request)
        self.owned.free_memory(request)

    def quarantine(self, request: Request) -> None:
        """Quarantines a request that ends: its blocks and slot stay until :meth:`release`, since bytes may
        still land there."""
        del self.transferring[request.request_id]
        self._leave_row(request)
        self.quarantined[request.request_id] = request

    def find_active(self, request_id: str) -> Request | None:
        """Returns the request if it waits, transfers, runs or is preempted."""
        queues = (*self._active, self.forks.waiting)
        return next((queue[request_id] for queue in queues if request_id in queue), None)

    @property
    def active(self) -> list[Request]:
        """All requests that wait, transfer, run or are preempted; running requests come first."""
        return [request for queue in self._active for request in queue.values()]

    @property
    def num_queued_tokens(self) -> int:
        """Given tokens that are not computed or read yet: the work that a new request's prompt waits for."""
        return sum(max(0, min(one.target, one.num_given) - one.num_computed) for one in self.active)

    def may_move(self, request: Request) -> bool:
        """Whether another server can continue the request: the request decodes, all its tokens except the
        newest one are computed, and one more answered request can be held."""
        is_decoding = request.request_id in self.running and not request.prefill_only
        return is_decoding and 0 < request.num_computed == len(request.tokens) - 1 and self.may_keep

    def _leave_row(self, request: Request) -> None:
        if request.row >= 0:
            self._left_rows.append(request.row)
            self.owned.free_row(request)

    # --- a step ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Makes room, admits what fits and plans the next step."""
        files, tier = self.owned.files, self.owned.cache.tier
        decode_rows, restless_rows, swap_out = self._plan_decode_rows()
        forks, admitted, swap_in = ([], [], []) if swap_out else self._admit()
        is_short_of_blocks = bool(swap_out)
        giver = None if swap_out else self._giver
        # What this plan copies to a request's memory, or from it, comes after what leaves the pools.
        moved = {one.request_id for one in admitted} | {fork.source.request_id for fork in forks}
        if giver is not None and giver.num_in_flight == 0 and giver.request_id not in moved:
            swap_out.append(self._preempt(giver))
            decode_rows = [row for row in decode_rows if row.request is not giver]
            restless_rows = [row for row in restless_rows if row.request is not giver]
            self.num_given_rows += 1
        self._step += 1
        left_rows, self._left_rows = self._left_rows, []
        if len(decode_rows) == len(self.running):  # all decode: no request has a prompt to compute
            return StepPlan(
                *(decode_rows, [], admitted, left_rows, swap_out, swap_in, [], []),
                *(is_short_of_blocks, restless_rows, tier.take(), files.take()),
            )
        num_running = len(decode_rows)
        prefilled = [r for r in self.running.values() if r.prefill_only and r.num_computed == r.target]
        for request in prefilled:
            self.hold(request)
        for request in admitted:
            if request.request_id in self.running and self.decode.is_next(request):
                decode_rows.append(self.decode.plan_admitted(request))
        budget = self._max_batch_tokens - len(decode_rows) * self._num_positions
        prefill_rows = self._chunks.plan(self.running.values(), budget, decode_rows)
        left_rows += self._left_rows  # rows of the prefilled requests
        self._left_rows = []
        return StepPlan(
            *(decode_rows, prefill_rows, admitted, left_rows, swap_out, swap_in, prefilled, forks),
            *(is_short_of_blocks, restless_rows + decode_rows[num_running:], tier.take(), files.take()),
        )

    @property
    def must_preempt(self) -> bool:
        """Whether the next plan may preempt a request. In this case steps in flight have to land first,
        because memory that they write to can't be moved."""
        if self._giver is not None:
            return True
        missing = 0
        for request in self.decode.restless(self.running.values()):
            if not self.decode.is_calm(request) and self.decode.is_next(request):
                missing += self.decode.num_missing_blocks(request)
        return missing > self.owned.cache.num_available_blocks

    def _plan_decode_rows(self) -> tuple[list[PlannedRow], list[PlannedRow], list[Swap]]:
        """Plans one row for each decoding request, oldest first; preempts requests when blocks run out.

        Returns all rows, the restless ones among them, and what was preempted.
        """
        planned: dict[Request, PlannedRow | None] = {}
        swap_out: list[Swap] = []
        for request in self.decode.restless(self.running.values()):
            planned[request] = None
            if self.decode.is_calm(request):
                planned[request] = self.decode.plan_calm(request)
            elif request.request_id in self.running and self.decode.is_next(request):
                missing = self.decode.num_missing_blocks(request)
                while missing > self.owned.cache.num_available_blocks and request.request_id in self.running:
                    shares = self._shares(self.running.values())
                    swap_out.append(self._preempt(shares.first_to_go(self.running.values())))
                    self.num_preemptions += 1
                if request.request_id in self.running:
                    planned[request] = self.decode.plan(request)
        return *self.decode.in_order(self.running.values(), planned), swap_out

    @property
    def _giver(self) -> Request | None:
        """The request that has to give its row to the request that found no room; None: no row is given now.

        Memory that is held for later turns is given up before any running request loses its blocks.
        """
        request = self._unplaced
        if request is None or (self._step % PAUSE_STEPS and self._takes_steps(1)):
            return None
        if (self.owned.free_rows and self.held) or len(self.preempted) >= self._max_num_seqs:
            return None
        if request.request_id not in self.waiting and request.request_id not in self.preempted:
            return None
        if not have_several_clients(self.running, self.transferring, {request.request_id: request}):
            return None
        num_blocks = self.capacity.blocks_for(request.target)
        decoding = [one for one in self.running.values() if not one.prefill_only]
        return self._shares(self._owners).giver_for(request, num_blocks, decoding)

    def _takes_steps(self, num_rows: int) -> bool:
        """Whether at least ``num_rows`` running requests take part in steps.

        If all of them wait for masks, no step may be computed for a long time, so nothing should be put off
        by a number of steps.
        """
        going_on = (one for one in self.running.values() if not one.awaits_masks)
        return sum(1 for _ in islice(going_on, num_rows)) == num_rows

    def _shares(self, owners: Iterable[Request]) -> FairShares:
        return FairShares(owners, num_rows=self._max_num_seqs, num_blocks=self.capacity.num_blocks)

    @property
    def _owners(self) -> list[Request]:
        """All requests that have rows."""
        return [*self.running.values(), *self.transferring.values()]

    def _preempt(self, request: Request) -> Swap:
        """Takes row, blocks and slots from a running request."""
        request_id = request.request_id
        del self.running[request_id]
        assert request.num_in_flight == 0, "what is in flight must land before it can be moved"
        request.calm_until = request.quiet_until = -1
        self.preempted[request_id] = request
        self.preempted.move_to_end(request_id, last=False)
        swap = self._swap(request)
        self._leave_row(request)
        self.owned.free_memory(request)
        return swap

    def _swap(self, request: Request, *, num_shared: int = 0) -> Swap:
        """Returns the memory of a request that has to be moved: its state, and the blocks it has filled,
        except the first ``num_shared``."""
        block_ids = request.memory.block_ids[num_shared : self.capacity.blocks_for(request.num_computed)]
        return Swap(request.request_id, tuple(block_ids), request.memory.state_slot, request.row)

    def _admit(self) -> tuple[list[Fork], list[Request], list[Swap]]:
        """Forks computed prompts, resumes preempted requests and admits waiting ones, while there is room."""
        forks = [self._fork(source) for source in self.forks.ready(self.running)]
        admitted = [self.running[copy.request_id] for fork in forks for copy in fork.copies]
        swap_in: list[Swap] = []
        self._unplaced = None
        several_wait = have_several_clients(self.preempted, self.waiting)
        while (request := self._next_to_admit(is_fair=several_wait)) is not None:
            if request.request_id in self.preempted:
                # While no other request runs, no spare block is required. Otherwise a request that fills the
                # pool would never be resumed.
                spare_blocks = 1 + len(self.running) if self.running else 0
                if not self.owned.readmit(request, spare_blocks=spare_blocks):
                    self._unplaced = request
                    break
                del self.preempted[request.request_id]
                swap_in.append(self._swap(request))
                self.running[request.request_id] = request
            else:
                if request.prefill_only and not self._may_hold_one_more():
                    break
                if not self.owned.admit(request, spare_blocks=self._spare_blocks()):
                    self._unplaced = request
                    break
                del self.waiting[request.request_id]
                place = self.running if request.ticket is None else self.transferring
                place[request.request_id] = request
            admitted.append(request)
        if any(request.num_given == 1 for request in admitted):
            self._last_short_prompt = self._step
        return forks, admitted, swap_in

    def _fork(self, source: Request) -> Fork:
        """Lets the forks of ``source`` run while there is room; the others count as preempted."""
        fork = Fork(self._swap(source), [], [])
        for request in self.forks.take(source):
            request.num_computed = request.num_planned = source.num_computed
            request.measured.num_cached = source.num_computed
            spare = self._spare_blocks()
            if self._is_first(request) and self.owned.fork(request, source, spare_blocks=spare):
                self.running[request.request_id] = request
                num_shared = len(self.owned.cache.blocks_of(request.memory.nodes))
                fork.copies.append(self._swap(request, num_shared=num_shared))
            else:
                self.preempted[request.request_id] = request
                fork.stored.append(request.request_id)
        return fork

    def _is_first(self, request: Request) -> bool:
        """Whether it is fair to other clients that a fork gets room before all requests that wait."""
        if not have_several_clients(self.preempted, self.waiting, {"": request}):
            return True
        waiting = chain([request], self.preempted.values(), self.waiting.values())
        return self._shares(self._owners).next_of(waiting) is request

    def _next_to_admit(self, *, is_fair: bool) -> Request | None:
        """Returns the first request, or the first one of the client with the smallest share.

        Preempted requests come before waiting ones.
        """
        waiting: Iterable[Request] = self.waiting.values()
        if self.owned.files.fetches:
            waiting = [one for one in waiting if not self.owned.files.holds_up(one.fetch)]
        is_soon = self._step < self._last_short_prompt + SHORT_PROMPT_STEPS
        if is_soon and self._takes_steps(FEW_ROWS + 1):
            waiting = [one for one in waiting if one.num_given > 1]
        queues = chain(self.preempted.values(), waiting)
        return self._shares(self._owners).next_of(queues) if is_fair else next(queues, None)

    def _may_hold_one_more(self) -> bool:
        """Whether one more prompt can be leased once it is prefilled.

        Equal prompts share blocks and state, so memory alone does not bound how many are held at once.
        """
        admitted = (*self.running.values(), *self.transferring.values(), *self.preempted.values())
        return len(self.held) + sum(request.prefill_only for request in admitted) < self.capacity.max_held

    @property
    def may_keep(self) -> bool:
        """Whether one more answered request can be held."""
        return len(self.held) < self.capacity.max_held

    def _spare_blocks(self) -> int:
        """Returns the blocks to leave free for requests that may soon grow, so that admission does not cause
        preemption."""
        if all(request.prefill_only for request in self.running.values()):
            return 0
        each = self.capacity.blocks_for(2 * self._num_positions - 1)
        return each * (len(self.running) + len(self.transferring))
