"""The engine: it schedules, runs the model, samples and reports the results. One thread calls it.

The same engine serves all roles. On a prefill server requests end with h(N-1) held for a decode server;
on a decode server they begin with an h(N-1) that was handed over; with role ``both`` no state is handed over.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import torch

from engine.config import EngineConfig
from engine.engine_parts import EngineParts
from engine.files.neighbours import StartNeighbours
from engine.files.start_files import StartFiles
from engine.grammar.following import Following
from engine.group.lockstep import Alone, Lockstep
from engine.landing import divide, previous_tokens
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.schedule.purges import Purges
from engine.schedule.step_plan import StepPlan
from engine.session_calls import SessionCalls
from engine.stats import EngineStats
from engine.step.burst import Bursts, stream_interval
from engine.step.launched_step import LaunchedStep, RowResult, measure_gaps
from engine.step_result import Landed, StepResult, last_output, still_in
from telemetry.engine_metrics import Measures
from telemetry.start_up import StartUp
from wire.errors import InvalidRequestError, TwinfangError
from wire.messages.generation import ErrorReply, FinishReason, RequestOutput, ServerStats
from wire.messages.group import StepShape
from wire.messages.handoff import Digests
from wire.messages.prefixes import PrefixNews
from wire.messages.ranks import FileNews, GrammarNews
from wire.messages.sampling_params import SamplingParams
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)


class Engine:
    """Model, caches and scheduler of one server, or of one of its tensor-parallel ranks."""

    def __init__(
        self,
        config: EngineConfig,
        tp: TensorParallel = ALONE,
        *,
        lockstep: Lockstep | None = None,
        start_up: StartUp | None = None,
        files: StartFiles | None = None,
        neighbours: StartNeighbours | None = None,
    ) -> None:
        self.start_up = start_up or StartUp()
        self.config = config
        self.tp = tp
        self._lockstep = lockstep or Alone()
        parts = EngineParts.make(config, tp, self.start_up, files, neighbours)
        self.device = parts.device
        self.model = parts.model
        self.fingerprint = parts.fingerprint
        self.grammars = parts.grammars
        self.capacity = parts.capacity
        self.caches = parts.caches
        self.scheduler = parts.scheduler
        self._sizes = parts.sizes
        self._store = parts.store
        self._checks = parts.checks
        self._runner = parts.runner
        self._following = Following(self.grammars, self._runner)
        self.file_choices = parts.file_choices
        self.host_pages = parts.store.pages
        self.calls = SessionCalls(self.scheduler.owned, self._checks, self._move)
        self.tend = self.calls.tend
        self.bursts = Bursts(stream_interval(config, self.device))
        self._steps_ahead = config.resolve_steps_ahead(self.device)
        self._in_flight: deque[LaunchedStep] = deque()
        self._landed = Landed()
        self._kept: dict[str, Request] = {}
        self.purges = Purges(self.scheduler, self._kept)
        self._read_s = 0.0
        """When the last step was read back."""
        self.num_dummy_steps = 0
        """Steps in which other ranks computed and this rank had nothing to compute."""
        self._start_counting()
        self._get_ready()

    def _start_counting(self) -> None:
        self._stats = EngineStats(self.config.num_positions - 1)
        self.measures = Measures(*self.scheduler.owned.tier_figures, flops=self._sizes.token_range_flops)

    def _get_ready(self) -> None:
        """Compiles the kernels and captures the graphs that steps run, so that no client's request waits for
        them."""
        self.warm_up()
        self._lockstep.settle(self.dummy_step)
        self.start_up.ended("warm_up")
        self._runner.capture()
        self.start_up.ended("graphs")
        log.info(
            "engine ready: role=%s device=%s blocks=%d slots=%d cache_bytes=%d speculative=%d drafter=%s",
            *(self.config.role, self.device),
            *(self.capacity.num_blocks - 1, self.capacity.num_slots - 1, self.capacity.num_bytes),
            *(self.config.num_speculative, self.config.resolve_drafter(self.model.config)),
        )

    def warm_up(self) -> None:
        """Runs two short requests, which together have every kind of row, so that no client's request waits
        for compilation. The greedy one reports its prompt's log-probabilities, the other one is random."""
        longer = min(20, self.capacity.max_model_len - 3)
        for num_tokens, temperature, num_top in ((2, 0, 1), (longer, 1, None)):
            sampling = SamplingParams(max_tokens=3, temperature=temperature, top_p=0.9)
            params = None if self.config.role == "prefill" else sampling
            self.add(Request("warm-up", [0] * num_tokens, params, prompt_logprobs_wanted=num_top))
            while not self.step().did_nothing:
                pass
            self.release("warm-up")
        self.scheduler.owned.cache.clear()
        self._start_counting()

    # --- events, between steps -------------------------------------------------------------------

    def open_grammar(self, request: Request) -> None:
        """Waits for the first masks of the request's grammar, unless the request already has a follower.

        Raises :class:`wire.errors.GrammarError` if the grammar can't be followed.
        """
        self._following.open(request)

    def add(self, request: Request) -> None:
        """Opens the request's grammar and queues the request.

        Raises :class:`InvalidRequestError` if the request can't be served.
        """
        try:
            self._check_ids(request)
            self.open_grammar(request)
            self.scheduler.add(request)
        except TwinfangError:
            self._following.drop(request)
            raise
        self._following.add(request)

    def _check_ids(self, request: Request) -> None:
        vocab_size = self.model.config.vocab_size
        for token_id in (min(request.tokens), max(request.tokens)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"token id {token_id} is outside the vocabulary: ids go from 0 to {vocab_size - 1}"
                )

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> Request | None:
        """Ends a request, in whatever queue it is, and returns the request; None if it has ended already.

        If another server's state is being read into its blocks and slot, these stay in quarantine until
        :meth:`transferred` reports a settled transfer. Steps in flight are read back first, so that they
        can't write to memory that has a new owner by then.
        """
        self._land_all()
        request = self.scheduler.find_active(request_id)
        if request is None:
            return None
        self._ended(request, reason)
        if request_id in self.scheduler.transferring:
            self.scheduler.quarantine(request)
        else:
            self._leave(request)
        return request

    def move_all(self) -> None:
        """Lets every request move to another server; the next step's result reports each as ``moved``.

        A request that decodes is also in that result's ``kept``: its blocks and state are held for the server
        that continues it. For a waiting request with an unread ticket, the output passes on this ticket. Any
        other request has to be prefilled again.
        """
        self._land_all()
        for request in self.scheduler.active:
            ticket = None
            if self.scheduler.may_move(request):
                self._ended(request, "moved")
                self._keep(request)
            else:
                if request.request_id in self.scheduler.waiting:
                    ticket = request.ticket  # an early ticket can be followed by another server as well
                self.cancel(request.request_id, "moved")
            self._landed.outputs.add(last_output(request, ticket=ticket))

    def reading(self, request_id: str) -> Request:
        """Returns a request whose transfer has not ended. The request may have been cancelled meanwhile."""
        return self.scheduler.transferring.get(request_id) or self.scheduler.quarantined[request_id]

    def transferred(
        self, request: Request, *, error: TwinfangError | None, settled: bool
    ) -> list[RequestOutput]:
        """Notes that a request's transfer has ended. With an error the request ends as well.

        If ``settled`` is False, bytes may still land: then blocks and slot of an ended request stay in
        quarantine until :meth:`release`. Returns the last output of a request that failed.
        """
        if request.request_id in self.scheduler.quarantined:  # cancelled meanwhile
            if settled:
                self.release(request.request_id)
            return []
        error = error or self._checks.received(request)
        if error is None:
            assert request.ticket is not None
            self.scheduler.transferred(request, request.ticket.num_tokens)
            self._runner.begin(request)
            return []
        self.scheduler.quarantine(request)
        if settled:
            self.release(request.request_id)
        return [self._failed(request, error)]

    def digests(self, request_id: str) -> Digests | None:
        """Returns checksums of what a held request's ticket names; None if the engine does not sanitize."""
        return self._checks.digests(self.scheduler.held[request_id])

    def release(self, request_id: str) -> None:
        """Frees blocks and slot of a held (prefilled or kept) or quarantined request."""
        self._kept.pop(request_id, None)
        self.scheduler.release(request_id)

    # --- one step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Admits requests, launches one batch, and reads back the steps that need not stay in flight."""
        return self.step_with(self.grammar_news(), self.file_choices.news())

    def grammar_news(self) -> tuple[GrammarNews, ...]:
        """Returns the masks and errors that arrived from the grammars since the last step."""
        if not self._following:
            return ()
        self._land_needed()
        return self._following.news()

    @torch.inference_mode()
    def step_with(self, news: tuple[GrammarNews, ...], files: FileNews | None = None) -> StepResult:
        """Runs :meth:`step` with the given news. With several ranks, rank 0 sends its news to all."""
        self._land_needed()
        self._following.take(news, self._fail)
        self.scheduler.owned.take_file_news(files)
        plan = self.scheduler.schedule()
        self._move(plan)
        plan = self._without(plan, self._checks.inspect(plan))
        shape = self._lockstep.agree(self._runner.shape_of(plan))
        if not plan.is_empty:
            self._launch(plan, shape)
        elif shape.num_tokens > 0:
            self.dummy_step(shape)
        begins = plan.admitted or plan.swap_out or plan.prefilled or shape.num_tokens
        did_nothing = not (begins or self._in_flight or self._landed.outputs)
        self._land_all(but=0 if plan.is_empty else self._steps_ahead)
        return self._result(plan, did_nothing=did_nothing)

    def _launch(self, plan: StepPlan, shape: StepShape) -> None:
        num_calm = 1 if self._following else self.scheduler.decode.num_calm_steps(plan)
        launched = self._runner.launch(plan, shape, self.bursts.begin(num_calm))
        self._in_flight.append(launched)
        self.scheduler.launched(plan, launched.num_steps)
        self._stats.num_steps += launched.num_steps

    def _land_needed(self) -> None:
        """Reads back all steps in flight if the next plan depends on them: either the plan may preempt a
        request, or the steps bring tokens that a grammar follows."""
        follows = bool(self._following) and any(one.is_followed for one in self._in_flight)
        if self._in_flight and (follows or self.scheduler.must_preempt):
            self._land_all()

    def _fail(self, request: Request, error: TwinfangError) -> None:
        self._landed.outputs.add(self._failed(request, error))
        self._leave(request)

    def _result(self, plan: StepPlan, *, did_nothing: bool) -> StepResult:
        """Returns what has been read back since the last result, and what the plan has begun."""
        landed, self._landed = self._landed, Landed()
        scheduler = self.scheduler
        has_work = scheduler.running or scheduler.waiting or scheduler.preempted or self._in_flight
        prefilled = still_in(scheduler.held, plan.prefilled + landed.prefilled)
        for request in prefilled:
            self.measures.ended["prefilled"] += 1
            self.measures.prefill.add(time.monotonic() - request.measured.admitted_s)
        return StepResult(
            landed.outputs.take(),
            prefilled,
            still_in(scheduler.running, landed.progressed),
            *(plan.to_transfer, landed.kept),
            self._to_give_up(plan),
            did_nothing=did_nothing,
            may_rest=not (did_nothing or has_work or self.config.is_lockstep),
            wait_s=self.file_choices.wait_s(),
        )

    @torch.inference_mode()
    def dummy_step(self, shape: StepShape) -> None:
        """Runs the step of an idle data-parallel rank. It touches only the null entries."""
        self._runner.launch_padding(shape)
        self.num_dummy_steps += 1

    def _move(self, plan: StepPlan) -> None:
        """Brings the row table and the pools into the state that the plan assumes, before its rows are
        computed."""
        self._runner.flush([*(s.row for s in plan.swap_out), *(fork.source.row for fork in plan.forks)])
        for row in plan.left_rows:
            self._runner.end(row)
        self._store.save(plan.swap_out, plan.host_copies.demoted)
        self._checks.vacated(plan)
        self._store.fork(plan.forks)
        for request in plan.admitted:
            self._admitted(request)
            if request.row >= 0:
                self._runner.begin(request)
        self._store.restore(plan.swap_in, plan.host_copies.promoted, plan.file_jobs)

    def _admitted(self, request: Request) -> None:
        measured = request.measured
        if not measured.admitted_s:  # otherwise it was preempted and resumes
            measured.admitted_s = time.monotonic()
            waited_s = measured.admitted_s - measured.arrived_s
            self.measures.admitted(waited_s, request.num_prompt, measured.num_cached, measured.num_promoted)

    def _without(self, plan: StepPlan, faults: list[tuple[Request, TwinfangError]]) -> StepPlan:
        """Returns the plan without requests that must not be computed; reports these requests as failed."""
        if not faults:
            return plan
        self.measures.state_faults["state"] += len(faults)
        plan = self.scheduler.discard(plan, [request for request, _ in faults])
        for request, error in faults:
            self._landed.outputs.add(self._failed(request, error))
        return plan

    def _land_all(self, *, but: int = 0) -> None:
        """Reads back the steps in flight, oldest first, except the newest ``but`` steps."""
        while len(self._in_flight) > but:
            launched = self._in_flight.popleft()
            results = launched.read()
            self._read_s = time.monotonic()
            launched.count_in(self.measures, self._read_s)
            quiet, others = divide(launched.plan.rows, results)
            self._checks.computed(launched.plan, results)
            previous = quiet.land(self._read_s, self._stats, self._landed)
            measure_gaps(self.measures, self._read_s, previous + previous_tokens(others))
            for row, result in others:
                self._land(row, result)
            for row, result in others if self._following else ():
                if row.samples:
                    self._following.ask(row.request, result.tokens, result.drafts)

    def _land(self, row: PlannedRow, result: RowResult) -> None:
        request = row.request
        self._stats.count(row, result)
        if not result.is_finite:
            fault = TwinfangError("the model's logits for this request are not finite; its state is damaged")
            self.measures.state_faults["logits"] += 1
            self.scheduler.owned.give_up(row)
            self._fail(request, fault)
            return
        num_steps = len(result.steps)
        self.scheduler.landed(row, result.accepted, num_steps=num_steps, newest=result.newest)
        if row.samples:
            self._accept(request, result)
        elif request.prefill_only and request.num_computed == request.target:
            self._runner.complete(request.row)
            self.scheduler.hold(request)
            self._landed.prefilled.append(request)
        elif request.prefill_only:
            self._landed.progressed.append(request)

    def _to_give_up(self, plan: StepPlan) -> list[str]:
        """Returns the ids of kept requests, oldest first, that have to make room for waiting ones.

        These are all kept requests if the plan is short of blocks, or the oldest one if a request waits and
        none was admitted.
        """
        waits = self.scheduler.waiting or self.scheduler.preempted
        count = len(self._kept) if plan.is_short_of_blocks else 1 if waits and not plan.admitted else 0
        names = list(self._kept)[:count]
        for name in names:
            del self._kept[name]
        return names + self.purges.take_given_up()

    def _accept(self, request: Request, result: RowResult) -> None:
        """Reports the answer's new tokens, and ends the request if the answer is complete with them."""
        measured = request.measured
        if not measured.first_token_s:
            measured.first_token_s = self._read_s
            self.measures.time_to_first_token.add(self._read_s - measured.arrived_s)
        measured.last_token_s = self._read_s
        if result.tokens[-1] in request.stop_token_ids:
            self._finish(request, "stop")
        elif len(request.tokens) > request.max_total_tokens:
            self._finish(request, "length")
        else:
            request.quiet_until = self.scheduler.owned.quiet_until(request)
        self._landed.gained(request, result)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request whose answer is complete; keeps its memory if the next turn may use it."""
        self._ended(request, reason)
        request.keeps_state = request.keeps_state and self.scheduler.may_keep
        if request.keeps_state:
            self._keep(request)
            self._kept[request.request_id] = request
        else:
            self._leave(request)

    def _ended(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.quiet_until = -1
        self.measures.ended[reason] += 1
        for fork in self.scheduler.forks.take(request):
            self._ended(fork, "moved")
            self._landed.outputs.add(last_output(fork))
        self._following.drop(request)

    def _keep(self, request: Request) -> None:
        """Holds blocks and state of an ended request for the request that continues from them."""
        self._store.drop(request.request_id)
        self._runner.complete(request.row)
        self.scheduler.hold(request)
        self._landed.kept.append(request)

    def _leave(self, request: Request) -> None:
        self._store.drop(request.request_id)
        self.scheduler.finish(request)

    def _failed(self, request: Request, error: TwinfangError) -> RequestOutput:
        kind = error.code
        lines.write(logging.WARNING, kind, "request %s failed: %s: %s", request.request_id, kind, error)
        self._ended(request, "error")
        return last_output(request, error=ErrorReply(error.code, error.message))

    # --- stats -----------------------------------------------------------------------------------

    def prefix_news(self, since: int | None) -> PrefixNews:
        """Returns the prefixes that the cache can serve, or only the changes since version ``since``."""
        self.file_choices.tell_routers()
        return self.scheduler.owned.cache.journal.news(since)

    def stats(self) -> ServerStats:
        """Returns the present load and memory; the transfer layer adds its own stats."""
        return self._stats.now(self.scheduler)
