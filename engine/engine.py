"""The engine: schedule, run the model, sample, and tell what happened. One thread calls it.

The same engine serves all roles. On a prefill server requests end with h(N-1) held for a decode server;
on a decode server they begin with one; with both roles they do neither.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import torch

from engine.cache_modes import make_cache_mode
from engine.caches import Caches
from engine.checks import Checks, NoChecks
from engine.config import EngineConfig
from engine.fingerprint import fingerprint
from engine.grammar import Grammars
from engine.host_store import HostStore
from engine.launched_step import LaunchedStep, RowResult
from engine.load import load_of
from engine.lockstep import Alone, Lockstep
from engine.models import load_model, read_config
from engine.request import Request
from engine.row_table import RowTable
from engine.rows import PlannedRow
from engine.sanitizer import Sanitizer
from engine.scheduler import Scheduler, StepPlan
from engine.step_result import StepResult
from engine.step_runner import StepRunner
from engine.tensor_parallel import ALONE, TensorParallel
from engine.token_gaps import measure_gaps
from engine.work_counts import WorkCounts
from kernels.host_memory import keep_freed_memory
from telemetry.measures import Measures
from telemetry.start_up import StartUp
from wire.errors import InvalidRequestError, TwinfangError
from wire.generation import ErrorReply, FinishReason, RequestOutput, ServerStats
from wire.handoff import Digests
from wire.lockstep import StepShape
from wire.outbox import Outbox
from wire.prefixes import PrefixNews
from wire.sampling_params import SamplingParams

log = logging.getLogger(__name__)

DAMAGED_ELSEWHERE = "the request's blocks or state are damaged on another tensor-parallel rank"


class Engine:
    """Model, caches and scheduler of one server, or of one of its tensor-parallel ranks."""

    def __init__(
        self,
        config: EngineConfig,
        tp: TensorParallel = ALONE,
        *,
        lockstep: Lockstep | None = None,
        start_up: StartUp | None = None,
    ) -> None:
        self.start_up = start_up or StartUp()
        self.config = config
        self.tp = tp
        self._lockstep = lockstep or Alone()
        self.num_dummy_steps = 0
        """Steps of other ranks in which this one had nothing to compute."""
        self.device = config.resolve_device(tp.rank)
        model_config = read_config(config.model_dir, config.dtype, self.device)
        config.apply_threads(model_config.dtype)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.start_up.ended("config")
        self.model = load_model(
            config.model_dir,
            dtype=config.dtype,
            device=self.device,
            mtp=config.loads_mtp(model_config),
            tp=tp,
            load_format=config.load_format,
            start_up=self.start_up,
        )
        demand = config.demand(model_config, tp)
        self.max_model_len = demand.max_model_len
        self.capacity = demand.within(tp.least(config.cache_budget(self.device)))
        self.caches = Caches(
            demand.spec,
            num_blocks=self.capacity.num_blocks,
            num_slots=self.capacity.num_slots,
            block_size=config.block_size,
            device=self.device,
        )
        self.fingerprint = fingerprint(
            config.model_dir,
            model_config.dtype,
            config.load_format,
            stochastic_rounding=config.mamba_cache_stochastic_rounding,
        )
        self.grammars = Grammars(config.model_dir, model_config.vocab_size, model_config.eos_token_ids)
        cuts = config.exact_cuts(demand.spec)
        unit = config.block_size if cuts is None else cuts.unit(config.block_size)
        has_state, state_block = self.capacity.has_state, config.state_block(unit)
        self.scheduler = Scheduler(
            self.capacity,
            make_cache_mode(config.cache_mode, unit, state_block, has_state=has_state),
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            num_positions=config.num_positions,
            fingerprint=self.fingerprint,
            cuts=cuts,
        )
        self._store = HostStore(self.caches)
        self._rows = RowTable(config.max_num_seqs, self.capacity.table_columns, config.num_positions)
        self._checks: Checks = NoChecks()
        if config.sanitize:
            self._checks = Sanitizer(self.caches, self.scheduler, self._rows, tp)
        self._runner = StepRunner(config, self.model, self.caches, self._rows, self.capacity, self._checks)
        self._steps_ahead = config.resolve_steps_ahead(self.device)
        self._in_flight: deque[LaunchedStep] = deque()
        self._landed = Outbox()
        self._landed_prefilled: list[Request] = []
        self._landed_chunks: list[Request] = []
        self._landed_kept: list[Request] = []
        self._kept: dict[str, Request] = {}
        self._counts = WorkCounts(config.num_positions - 1)
        self.measures = Measures()
        self._read_s = 0.0
        """When the last step was read back."""
        self.start_up.ended("pools")
        self.warm_up()
        self._lockstep.settle(self._take_part)
        self.start_up.ended("warm_up")
        self._runner.capture()
        self.start_up.ended("graphs")
        log.info(
            "engine ready: role=%s device=%s blocks=%d slots=%d cache_bytes=%d speculative=%d drafter=%s",
            config.role,
            self.device,
            self.capacity.num_blocks - 1,
            self.capacity.num_slots - 1,
            self.capacity.num_bytes,
            config.num_speculative,
            config.resolve_drafter(model_config),
        )

    def warm_up(self) -> None:
        """Runs a short request of each kind of row, greedy and drawn: no client's pays for compiling."""
        for num_tokens, temperature in ((2, 0), (min(20, self.max_model_len - 3), 1)):
            params = None
            if self.config.role != "prefill":
                params = SamplingParams(max_tokens=3, temperature=temperature, top_p=0.9)
            self.add(Request("warm-up", [0] * num_tokens, params))
            while not self.step().did_nothing:
                pass
            self.release("warm-up")
        self.scheduler.owned.cache.clear()
        self._counts = WorkCounts(self.config.num_positions - 1)
        self.measures = Measures()

    def before_free(self, tell: Callable[[Request], None]) -> None:
        """``tell`` is called with each request that gives its memory back, before others may get that."""
        self.scheduler.owned.before_free = tell

    # --- events, between steps -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. Raises :class:`InvalidRequestError` for one that can't be served.

        A grammar is compiled here unless the request comes with its matcher, which other threads can make.
        """
        vocab_size = self.model.config.vocab_size
        for token_id in (min(request.tokens), max(request.tokens)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"token id {token_id} is outside the vocabulary: ids go from 0 to {vocab_size - 1}"
                )
        grammar = None if request.params is None else request.params.grammar
        if grammar is not None and request.matcher is None:
            request.matcher = self.grammars.matcher(grammar, request.tokens[request.num_prompt :])
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> Request | None:
        """Ends a request wherever it is and returns it; None if it has ended already.

        Blocks and slot under transfer stay untouched until :meth:`transferred` says that it is settled.
        A step in flight lands first: what it writes must not be anyone else's by then.
        """
        request = self._cancel(request_id)
        if request is not None:
            self.measures.ended["cancelled"] += 1
        return request

    def _cancel(self, request_id: str) -> Request | None:
        self._land_all()
        request = self.scheduler.find_active(request_id)
        if request is None:
            return None
        request.finish_reason = "cancelled"
        if request_id in self.scheduler.transferring:
            self.scheduler.quarantine(request)
        else:
            self._leave(request)
        return request

    def move_all(self) -> None:
        """Lets every request go to another server; the next step's result tells of each, as ``moved``.

        One that decodes is among that result's ``kept``: its blocks and state are held for whoever goes on
        with it. One that has not read its ticket yet gives it on; any other has to be prefilled anew.
        """
        self._land_all()
        for request in self.scheduler.active:
            ticket = None
            if self.scheduler.may_move(request):
                self._store.drop(request.request_id)
                self.scheduler.hold(request)
                self._landed_kept.append(request)
            else:
                if request.request_id in self.scheduler.waiting:
                    ticket = request.ticket  # an early one can be followed as well
                self._cancel(request.request_id)
            request.finish_reason = "moved"
            self.measures.ended["moved"] += 1
            self._landed.add(
                RequestOutput(
                    request.request_id, (), finish_reason="moved", ticket=ticket, stats=request.stats()
                )
            )

    def transferred(
        self, request: Request, *, error: TwinfangError | None, settled: bool
    ) -> list[RequestOutput]:
        """Takes note that a request's transfer ended; with an error the request ends as well.

        ``settled`` False keeps blocks and slot in quarantine until :meth:`release`.
        """
        if request.request_id in self.scheduler.quarantined:  # cancelled meanwhile
            if settled:
                self._release(request.request_id)
            return []
        error = error or self._received(request)
        if error is None:
            assert request.ticket is not None
            self.scheduler.transferred(request, request.ticket.num_tokens)
            self._runner.begin(request)
            return []
        self.scheduler.quarantine(request)
        if settled:
            self._release(request.request_id)
        return [self._failed(request, error)]

    def _received(self, request: Request) -> TwinfangError | None:
        """What is wrong with what has landed, on any rank."""
        error = self._checks.received(request)
        is_damaged = self.tp.any([error is not None])[0] if self.config.sanitize else False
        return error or (TwinfangError(DAMAGED_ELSEWHERE) if is_damaged else None)

    def digests(self, request: Request) -> Digests | None:
        """Checksums of what a held request's ticket names; None if the engine does not sanitize."""
        return self._checks.digests(request)

    def release(self, request_id: str) -> None:
        """Frees blocks and slot of a held (prefilled or kept) or quarantined request."""
        self._release(request_id)

    def _release(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
        self.scheduler.release(request_id)

    # --- one step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Admits, launches one batch, and reads back the step that so is no longer needed in flight."""
        if self._in_flight and (self.scheduler.must_preempt or self._runner.awaits_tokens):
            self._land_all()
        plan = self.scheduler.schedule()
        self._move(plan)
        for find_faults in (self._damaged, self._runner.constrain):
            plan, failed = self._without(plan, find_faults(plan))
            self._landed.add_all(failed)
        shape = self._lockstep.agree(self._runner.shape_of(plan))
        if not plan.is_empty:
            self._in_flight.append(self._runner.launch(plan, shape))
            self.scheduler.launched(plan)
            self._counts.num_steps += 1
        elif shape.num_tokens > 0:
            self._take_part(shape)
        did_nothing = not (
            self._in_flight
            or self._landed
            or plan.admitted
            or plan.swap_out
            or plan.prefilled
            or shape.num_tokens
        )
        self._land_all(but=0 if plan.is_empty else self._steps_ahead)
        return self._result(plan, did_nothing=did_nothing)

    def _result(self, plan: StepPlan, *, did_nothing: bool) -> StepResult:
        """What has been read back since the last result, and what the plan has begun."""
        held, running = self.scheduler.held, self.scheduler.running
        landed = plan.prefilled + self._landed_prefilled
        prefilled = [one for one in landed if held.get(one.request_id) is one]  # else released meanwhile
        for request in prefilled:
            self.measures.ended["prefilled"] += 1
            self.measures.prefill.add(time.monotonic() - request.admitted_s)
        progressed = [one for one in self._landed_chunks if running.get(one.request_id) is one]
        kept = self._landed_kept
        self._landed_prefilled, self._landed_kept, self._landed_chunks = [], [], []
        return StepResult(
            self._landed.take(),
            prefilled,
            progressed,
            plan.to_transfer,
            kept,
            self._to_give_up(plan),
            did_nothing=did_nothing,
        )

    @torch.inference_mode()
    def _take_part(self, shape: StepShape) -> None:
        """The step of an idle data-parallel rank: it touches nothing but the null entries."""
        self._runner.launch_padding(shape)
        self.num_dummy_steps += 1

    def dummy_step(self, num_rows: int) -> None:
        """The same beside ranks of which the busiest decodes ``num_rows`` rows."""
        self._take_part(self._runner.decode_shape(num_rows))

    def _move(self, plan: StepPlan) -> None:
        """Brings row table and pools to where the plan has them, before anything is computed."""
        for row in plan.left_rows:
            self._runner.end(row)
        for swap in plan.swap_out:
            self._store.save(swap)
        self._checks.vacated(plan)
        for request in plan.admitted:
            self._admitted(request)
            if request.row >= 0:
                self._runner.begin(request)
        for swap in plan.swap_in:
            self._store.restore(swap)

    def _admitted(self, request: Request) -> None:
        if not request.admitted_s:  # else it was preempted and is back
            request.admitted_s = time.monotonic()
            waited_s = request.admitted_s - request.arrived_s
            self.measures.admitted(waited_s, request.num_prompt, request.num_cached)

    def _without(
        self, plan: StepPlan, faults: list[tuple[Request, TwinfangError]]
    ) -> tuple[StepPlan, list[RequestOutput]]:
        """The plan without requests that must not be computed, and what to tell those."""
        if not faults:
            return plan, []
        plan = self.scheduler.discard(plan, [request for request, _ in faults])
        return plan, [self._failed(request, error) for request, error in faults]

    def _damaged(self, plan: StepPlan) -> list[tuple[Request, TwinfangError]]:
        """Requests whose blocks or state are: found by the rank that has them, they have to leave on all."""
        if not self.config.sanitize:
            return []
        faults: dict[Request, TwinfangError] = dict(self._checks.inspect(plan))
        returned = [self.scheduler.running[swap.request_id] for swap in plan.swap_in]
        planned = list(dict.fromkeys([*returned, *(row.request for row in plan.rows), *plan.prefilled]))
        is_damaged = self.tp.any([request in faults for request in planned])
        for request, damaged in zip(planned, is_damaged, strict=True):
            if damaged:
                faults.setdefault(request, TwinfangError(DAMAGED_ELSEWHERE))
        self.measures.state_faults["state"] += len(faults)
        return [(request, faults[request]) for request in planned if request in faults]

    def _land_all(self, *, but: int = 0) -> None:
        """Reads back what is in flight, oldest first, all but the newest ``but`` steps."""
        while len(self._in_flight) > but:
            launched = self._in_flight.popleft()
            results = launched.read()
            self._read_s = time.monotonic()
            launched.count_in(self.measures, self._read_s)
            # Those that ended in the step before are no one's concern any more.
            brought = [
                (row, result)
                for row, result in zip(launched.plan.rows, results, strict=True)
                if row.request.finish_reason is None
            ]
            for row, result in brought:
                self._extend(row, result)
            self._checks.computed(launched.plan, results)
            measure_gaps(self.measures, self._read_s, brought)
            for row, result in brought:
                self._land(row, result)

    def _extend(self, row: PlannedRow, result: RowResult) -> None:
        """Gained tokens join the answer; a forced one is the prompt's own."""
        request = row.request
        if row.samples and result.is_finite:
            request.tokens += result.tokens
            if request.matcher is not None and result.tokens[-1] not in request.stop_token_ids:
                request.matcher.advance(result.tokens)

    def _land(self, row: PlannedRow, result: RowResult) -> None:
        request = row.request
        self._counts.count(row, result)
        if not result.is_finite:
            fault = TwinfangError("the model's logits for this request are not finite; its state is damaged")
            self.measures.state_faults["logits"] += 1
            self._landed.add(self._failed(request, fault))
            self.scheduler.owned.give_up(row)
            self._leave(request)
            return
        self.scheduler.landed(row, result.accepted)
        if row.samples:
            self._accept(request, result)
        elif request.prefill_only and request.num_computed == request.target:
            self.scheduler.hold(request)
            self._landed_prefilled.append(request)
        elif request.prefill_only:
            self._landed_chunks.append(request)

    def _to_give_up(self, plan: StepPlan) -> list[str]:
        """What is kept for later turns makes room for those who wait now, oldest first; all before a swap."""
        waits = self.scheduler.waiting or self.scheduler.preempted
        count = len(self._kept) if plan.swap_out else 1 if waits and not plan.admitted else 0
        names = list(self._kept)[:count]
        for name in names:
            del self._kept[name]
        return names

    def _accept(self, request: Request, result: RowResult) -> None:
        """Tells of gained tokens, and ends the request where they are its last."""
        token_ids = result.tokens
        last, prompt_logprobs = token_ids[-1], None
        if request.prompt_logprobs and request.num_output == len(token_ids):
            prompt_logprobs = tuple(request.prompt_logprobs)
        if not request.first_token_s:
            request.first_token_s = self._read_s
            self.measures.time_to_first_token.add(self._read_s - request.arrived_s)
        request.last_token_s = self._read_s
        if last in request.stop_token_ids:
            self._finish(request, "stop")
        elif len(request.tokens) > request.max_total_tokens:
            self._finish(request, "length")
        elif result.logprobs is None and prompt_logprobs is None:
            self._landed.add_tokens(request.request_id, token_ids)
            return
        self._landed.add(
            RequestOutput(
                request_id=request.request_id,
                token_ids=token_ids,
                logprobs=result.logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=request.finish_reason,
                stop_token_id=last if request.finish_reason == "stop" else None,
                stats=None if request.finish_reason is None else request.stats(),
            )
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The answer is complete; what the conversation's next turn may want of it is held."""
        request.finish_reason = reason
        self.measures.ended[reason] += 1
        request.keeps_state = request.keeps_state and self.scheduler.may_keep
        if request.keeps_state:
            self._store.drop(request.request_id)
            self.scheduler.hold(request)
            self._landed_kept.append(request)
            self._kept[request.request_id] = request
        else:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self._store.drop(request.request_id)
        self.scheduler.finish(request)

    def _failed(self, request: Request, error: TwinfangError) -> RequestOutput:
        log.warning("request %s failed: %s", request.request_id, error)
        request.finish_reason = "error"
        self.measures.ended["error"] += 1
        return RequestOutput(
            request_id=request.request_id,
            token_ids=(),
            finish_reason="error",
            error=ErrorReply(error.code, error.message),
            stats=request.stats(),
        )

    # --- figures ---------------------------------------------------------------------------------

    def prefix_news(self, since: int | None) -> PrefixNews:
        """Which prefixes the cache can serve, for somebody who has version ``since`` of that."""
        return self.scheduler.owned.cache.journal.news(since)

    def stats(self) -> ServerStats:
        """Load and memory now; the transfer layer adds what it knows."""
        return load_of(self.scheduler, self._counts)
