"""Launches steps. Connects the row tables, step buffers, program and graphs of one engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.config import EngineConfig
from engine.cost.step_memory import captured_prompts
from engine.memory.async_copy import Download
from engine.memory.caches import Caches, LayerCaches
from engine.memory.row_fields import send
from engine.models.causal_lm import CausalLM
from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_table import SamplingNeeds, SamplingTable
from engine.sampling.thinking_budgets import ThinkingBudgets
from engine.schedule.capacity import CapacityPlan
from engine.schedule.step_plan import StepPlan
from engine.step.batch_builder import BatchBuilder
from engine.step.buffers import StepBuffers
from engine.step.burst import ONE_STEP, Burst
from engine.step.checks import Checks
from engine.step.draft_states import DraftStates, ReplayedStates, SlotStates
from engine.step.drafters import MtpDrafter, NgramDrafter
from engine.step.grammar_masks import GrammarMasks
from engine.step.graph import StepGraphs
from engine.step.launched_step import LaunchedStep, scores_prompt
from engine.step.passes.prompt_graphs import PromptGraphs
from engine.step.passes.recorded_forward import RecordedForward
from engine.step.program import Drafter, NoDrafter, Step, StepProgram, StepTensors
from engine.step.recorded_steps import RecordedSteps
from engine.step.row_progress import RowState
from engine.step.row_table import RowTable
from telemetry.engine_metrics import StepRun
from wire.messages.group import NOTHING, StepShape
from wire.messages.sampling_params import MAX_STOP_TOKEN_IDS

log = logging.getLogger(__name__)

GREEDY = SamplingNeeds()


class _Launched(NamedTuple):
    step: Step
    tensors: StepTensors
    run: StepRun
    results: list[Download]
    """``[steps, rows, T + 3]`` each"""


class StepRunner:
    """Turns plans into launched steps. Owns the rows' tables on the device."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        caches: Caches,
        rows: RowTable,
        capacity: CapacityPlan,
        checks: Checks,
    ) -> None:
        device, num_rows = caches.state.device, config.max_num_seqs
        self._model = model
        self._rows = rows
        self._checks = checks
        self._capacity = capacity
        self._num_positions = config.num_positions
        self.state = RowState(num_rows, config.num_positions, device)
        self._sampling = SamplingTable(
            num_rows,
            model.config.vocab_size,
            device,
            max_stop_ids=MAX_STOP_TOKEN_IDS + len(model.config.eos_token_ids),
        )
        self._masks = GrammarMasks(num_rows, config.num_positions, model.config.vocab_size, device)
        self._budgets = ThinkingBudgets(num_rows, device)
        sampler = Sampler(self._sampling, self._masks.table, self._budgets)
        self._buffers = StepBuffers(
            rows, self.state, block_size=config.block_size, device=device, replays=capacity.replays
        )
        self._states: DraftStates = SlotStates(caches.layers)
        if capacity.replays:
            log.info("decode rows replay drafted tokens: inputs of %d bytes are kept", capacity.kept_bytes)
            self._states = ReplayedStates(model, caches, self.state, rows)
        layers = self._states.layers
        self._reporting: set[int] = set()
        """Rows whose requests want log-probabilities, of their prompt or their answer."""
        self._drafter = self._make_drafter(config, layers, sampler)
        # Ranks in lockstep exchange tokens in every block: all of them compute all blocks.
        self._always_reads_hidden = config.is_lockstep or isinstance(self._drafter, MtpDrafter)
        self._builder = BatchBuilder(rows, self._buffers, block_size=config.block_size, device=device)
        accept = self._buffers.accept_drafts(self.state, self._sampling.stop_ids)
        captures = config.role != "prefill" and not config.sanitize
        recorded = RecordedForward(model, layers) if captures and _records(model) else None
        self._program = StepProgram(
            model, layers, self.state, sampler, accept, self._states.accepted, self._drafter, recorded
        )
        max_seq_len = capacity.max_model_len + config.num_positions
        self._graphs = StepGraphs(
            self._program,
            self._builder,
            self._buffers,
            max_seq_len=max_seq_len,
            device=device,
            captures=captures,
        )
        self._recorded = None
        if recorded is not None and not capacity.replays:
            self._recorded = RecordedSteps(self._program, self._builder, recorded, max_seq_len=max_seq_len)
        self._prompts = PromptGraphs(
            model,
            layers,
            sizes=captured_prompts(config),
            columns=rows.block_table.shape[1],
            max_seq_len=capacity.max_model_len,
            reads_hidden=config.role != "prefill" or self._always_reads_hidden,
        )

    def _make_drafter(self, config: EngineConfig, layers: LayerCaches, sampler: Sampler) -> Drafter:
        name = config.resolve_drafter(self._model.config)
        if name == "mtp":
            return MtpDrafter(
                self._model,
                layers,
                self.state,
                sampler,
                num_drafts=config.num_positions - 1,
                block_size=config.block_size,
            )
        if name == "ngram" and config.num_positions > 1:
            return NgramDrafter(
                self.state,
                self._buffers,
                max_model_len=self._capacity.max_model_len,
                min_n=config.ngram_min,
                max_n=config.ngram_max,
            )
        return NoDrafter()

    @torch.inference_mode()
    def capture(self) -> None:
        """Compile what no request may wait for, and capture all graphs, of which a CPU has none."""
        self._model.warm_up()
        self._states.warm_up()
        self._graphs.capture_all()
        self._prompts.capture_all(self._graphs.pool)

    def begin(self, request: Request) -> None:
        """Fill the row of a request that was admitted or whose state has arrived.

        The next step may use the row.
        """
        self._rows.fill(request)
        self.state.fill(request)
        self._states.begin(request)
        if request.params is not None:
            self._sampling.fill(request)
            if request.params.logprobs is not None:
                self._reporting.add(request.row)
        if request.prompt_logprobs_wanted is not None:
            self._reporting.add(request.row)
        self._masks.fill(request)
        self._budgets.fill(request)
        self._drafter.fill(request)

    def end(self, row: int) -> None:
        """Clear the row of a request that has left. No later step finds a trace of the request."""
        self._rows.clear(row)
        self._reporting.discard(row)
        self.state.clear(row)
        self._states.end(row)
        self._sampling.clear(row)
        self._masks.clear(row)
        self._budgets.clear(row)

    def flush(self, rows: Sequence[int]) -> None:
        """Complete the states of rows that are not in flight, before others read them in the pool."""
        if rows:
            self._send()
            self._states.flush(rows)

    def complete(self, row: int) -> None:
        """Complete a row's state and wait for it, so that another server may read it."""
        self._send()  # the row may have been filled since the last step
        self._states.complete(row)

    def allow(self, request: Request) -> None:
        """Write the new grammar masks of a running request."""
        self._masks.fill(request)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """Return the shape that the plan's step needs. A group's ranks agree on one shape for their steps."""
        if plan.is_empty:
            return NOTHING
        if not plan.prefill_rows:
            return self.decode_shape(len(plan.decode_rows))
        num_tokens = len(plan.decode_rows) * self._num_positions
        num_tokens += sum(row.num_new for row in plan.prefill_rows)
        # A rank with nothing to compute runs a padding row, which may have more tokens than this step.
        return StepShape(0, max(num_tokens, self.decode_shape(1).num_tokens), True)

    def decode_shape(self, num_rows: int) -> StepShape:
        """Return the shape of a step of ``num_rows`` decode rows and nothing else."""
        num_rows = self._buffers.captured(num_rows)
        return StepShape(num_rows, num_rows * self._num_positions, False)

    def launch(self, plan: StepPlan, shape: StepShape, burst: Burst = ONE_STEP) -> LaunchedStep:
        """Start the plan's step, without waiting for the device, and the further steps of a burst.

        ``shape`` is the shape that the group's ranks agreed on. The step fits into it.
        """
        self._agreed(shape)
        self._send()
        launched_s = time.monotonic()
        eventful = plan.eventful_rows
        for row in eventful:
            self._rows.extend(row.request)
        self._states.before(eventful)
        idle = {row.request for row in eventful if not row.samples}
        sampling = [row.request for row in plan.rows if row.request not in idle]
        needs = self._sampling.needs(sampling)
        launched: _Launched | None
        if plan.prefill_rows:
            launched = self._launch_mixed(plan, needs, reads_hidden=bool(sampling or self._reporting))
        else:
            num_rows = self._buffers.captured(len(plan.decode_rows)) if shape.is_mixed else shape.num_rows
            replays = bool(sampling) and not shape.is_mixed and not scores_prompt(eventful)
            self._buffers.load(plan.decode_rows, num_rows, self._states.restless_rows(plan))
            burst = ONE_STEP if self._reporting else burst
            launched = self._replay(len(plan.rows), num_rows, needs, burst) if replays else None
            if launched is None:
                launched = self._launch_decode(plan, needs, num_rows, burst, samples=bool(sampling))
        self._states.after(eventful)
        step, tensors, run, results = launched
        return LaunchedStep.follow(
            plan,
            step,
            tensors,
            self._model,
            self.state,
            launched_s=launched_s,
            run=run,
            reporting=self._reporting,
            results=results,
        )

    def _send(self) -> None:
        """Queue the upload of the rows that were filled or cleared, after the steps that still use their old
        content."""
        send([self.state.fields, self._sampling.fields, self._budgets.fields])
        self._masks.send()

    def _most_tokens(self, decode_rows: list[PlannedRow]) -> int:
        """Return an upper bound of the rows' lengths, their new positions included; 0 without rows."""
        width = self._num_positions
        most = [row.request.num_planned + row.request.num_in_flight * width for row in decode_rows]
        return max(most) + width if most else 0

    def _agreed(self, shape: StepShape) -> None:
        """Set the token count that the ranks have agreed on.

        In a decode-only step all ranks have the same number of tokens. In a mixed step each rank pads its
        tokens to the agreed count.
        """
        self._model.tp.experts.pad_to(shape.num_tokens if shape.is_mixed else None)

    def _launch_mixed(self, plan: StepPlan, needs: SamplingNeeds, *, reads_hidden: bool) -> _Launched:
        """Launch a step with prefill rows."""
        self._buffers.load(plan.decode_rows, len(plan.decode_rows), self._states.restless_rows(plan))
        reads_hidden = reads_hidden or self._always_reads_hidden
        max_seq_len = self._most_tokens(plan.decode_rows)
        step = self._builder.mixed_step(plan, needs, max_seq_len=max_seq_len, reads_hidden=reads_hidden)
        self._checks.compare(plan, step.batch)
        fits = self._prompts.fits(step.batch, reads_hidden=reads_hidden)
        tensors = self._program.run(step, self._prompts if fits else None)
        return _Launched(step, tensors, "graph" if fits else "eager", [_download(step, len(plan.rows))])

    def _launch_decode(
        self, plan: StepPlan, needs: SamplingNeeds, num_rows: int, burst: Burst, *, samples: bool
    ) -> _Launched:
        """Launch the step whose rows are loaded in the buffers, call by call, and the further steps of a
        burst."""
        began_s, results = time.monotonic(), list[Download]()
        while not results or burst.goes_on(len(results), began_s):
            max_seq_len = self._most_tokens(plan.decode_rows) + len(results) * self._num_positions
            step = self._builder.decode_step(num_rows, needs, max_seq_len=max_seq_len, samples=samples)
            if not results:
                self._checks.compare(plan, step.batch)
            tensors = self._program.run(step)
            results.append(_download(step, len(plan.rows)))
        return _Launched(step, tensors, "graph" if self._program.replays(step) else "eager", results)

    def _replay(
        self, num_planned: int, num_rows: int, needs: SamplingNeeds, burst: Burst
    ) -> _Launched | None:
        """Replay the step whose rows are loaded in the buffers; None if no graph holds all of it.

        No graph is of a step of a mixed group, whose collectives differ, of one in which no row samples, or
        of one that scores a prompt: graphs do not keep the hidden states.
        """
        if self._recorded is not None:
            if (found := self._recorded.replay(num_rows, needs, burst)) is None:
                return None
            step, tensors, results = found
            return _Launched(step, tensors, "graph", [Download(results[:, :num_planned])])
        if (captured := self._graphs.replay(num_rows, needs)) is None:
            return None
        return _Launched(*captured, "graph", [_download(captured[0], num_planned)])

    def launch_padding(self, shape: StepShape) -> None:
        """Launch a step of padding rows. An idle data-parallel rank runs it while other ranks are busy."""
        self._agreed(shape)
        self._send()
        num_rows = self._buffers.captured(1) if shape.is_mixed else shape.num_rows
        self._buffers.load([], num_rows)
        if shape.is_mixed or self._graphs.replay(num_rows, GREEDY) is None:
            step = self._builder.decode_step(num_rows, GREEDY, max_seq_len=self._num_positions, samples=True)
            self._program.run(step)


def _download(step: Step, num_planned: int) -> Download:
    """Copy one step's results to the host."""
    return Download(step.results[None, :num_planned])


def _records(model: CausalLM) -> bool:
    """Return whether the model's decode passes can be recorded, which needs a CPU.

    If a model on a CPU can't be recorded, the reason is logged.
    """
    obstacle = RecordedForward.obstacle(model)
    if obstacle is not None and model.embeddings.device.type == "cpu":
        log.info("decode steps are not recorded, each kernel is called from Python: %s", obstacle)
    return obstacle is None
