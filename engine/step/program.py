"""The computation of one step, from its inputs to the next step's drafts. All of it runs on the device.

    prepare   decode rows: inputs and indices from the last step's results (kernels/speculation/)
    forward   the model over all tokens; updates KV and states
    sample    at every position, the next token that the target chooses itself
    accept    keeps drafts that equal these tokens, advances the tables (kernels/speculation/accept_drafts.py,
              engine/step/draft_states.py)
    draft     guesses inputs of the next step

The *target* is the served model, in contrast to the drafter. In shapes, ``n`` is the number of the step's
tokens, ``H`` the hidden size and ``V`` the size of the vocabulary; :class:`Step` explains the other letters.
Nothing waits for the device and no shape depends on its data, so that the whole step can be captured as a
graph (:mod:`engine.step.graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.memory.caches import LayerCaches
from engine.models.batch import Batch
from engine.models.causal_lm import CausalLM
from engine.request import Request
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_table import SamplingNeeds
from engine.step.passes.prompt_graphs import PromptGraphs
from engine.step.passes.recorded_forward import RecordedForward
from engine.step.row_progress import RowState
from kernels.cpu.call_list import batched_calls
from kernels.cpu.threads import cpu_threads
from kernels.speculation.accept_drafts import AcceptDrafts


@dataclass(frozen=True)
class SamplingEnds:
    """The ``s`` prefill rows that sample. The host knows all of it, so no step looks it up. Integers are
    int64."""

    places: Tensor
    """``[s]`` places among all rows of the step."""
    rows: Tensor
    """``[s]`` rows of the tables."""
    tokens: Tensor
    """``[s]`` each row's last token, as an index among the step's tokens."""
    positions: Tensor
    """``[s, 1]`` of these tokens."""
    input_ids: Tensor
    """``[s, 1]``"""


@dataclass(frozen=True)
class PrefillEnds:
    """The ends of a step's ``S`` prefill rows, and the tokens that follow. Integers are int64."""

    last_tokens: Tensor
    """``[S]`` each row's last token, as an index among the step's tokens."""
    last_positions: Tensor
    """``[S]`` the last tokens' positions, int32."""
    sampling: SamplingEnds
    next_ids: Tensor
    """``[tokens]`` the prompt's token after each token; 0 for a row's last token if the row samples."""


@dataclass(frozen=True)
class Step:
    """``M`` rows: ``R`` decode rows with ``T`` positions each, then ``S`` prefill rows."""

    batch: Batch
    rows: Tensor
    """``[M]`` int64 rows of the tables; the null row in padding."""
    forced: Tensor
    """``[M]`` int64 the prompt's token after the row's last token; -1 if the row samples."""
    write_slots: Tensor
    """``[M, T]`` slots for the state after each position; in a prefill row only the first is used."""
    block_table: Tensor
    """``[M, columns]``"""
    accepted: Tensor
    """``[M]`` int32: number of accepted positions; the step writes it."""
    results: Tensor
    """``[M, T + 3]`` int64: accepted, finite, drafts tried, tokens gained; the step writes it."""
    samples: bool
    """Whether any row samples."""
    reads_hidden: bool
    """Whether anything reads the hidden states. Otherwise the step only updates the caches, such as that of a
    prompt on a prefill server."""
    needs: SamplingNeeds
    ends: PrefillEnds | None
    """None if all rows are decode rows."""
    logits: Tensor | None = None
    """``[R, T, V]`` float32: where the step writes the decode rows' logits; None for a new tensor."""

    @property
    def num_decode(self) -> int:
        return 0 if self.batch.decode is None else self.batch.decode.num_rows


class Drafter(Protocol):
    """Guesses tokens after the newest known token. A wrong guess costs only time."""

    is_recorded: bool
    """Whether all that it does on a CPU are calls of kernels (:mod:`kernels.cpu.graph`)."""

    def fill(self, request: Request) -> None:
        """Prepare for a request that begins to run in its row."""

    def draft(self, step: Step, hidden: Tensor | None) -> None:
        """Write the rows' drafts into ``RowState.tokens[:, 1:]``. May lower ``RowState.num_drafts``.

        ``hidden`` ``[n, H]`` are the target's hidden states at the step's tokens, unless nothing reads them.
        """


class NoDrafter:
    """Drafts nothing: each step gives one token."""

    is_recorded = True

    def fill(self, request: Request) -> None:
        pass

    def draft(self, step: Step, hidden: Tensor | None) -> None:
        pass


@dataclass(frozen=True)
class StepTensors:
    """Tensors of a step that stay on the device, for log-probabilities."""

    hidden: Tensor | None
    """``[n, H]``; None after a graph, which does not keep them, and if nothing reads them."""
    decode_logits: Tensor | None
    """``[R, T, V]``"""
    prefill_logits: Tensor | None
    """``[s, 1, V]``, of the prefill rows that sample"""


class StepProgram:
    """Runs steps on its model, caches and row tables.

    ``accept`` is bound to the step buffers, which hold the rows of decode-only steps. ``note_accepted`` is
    called when a step has accepted its drafts.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: LayerCaches,
        state: RowState,
        sampler: Sampler,
        accept: AcceptDrafts,
        note_accepted: Callable[[Step], None],
        drafter: Drafter,
        recorded: RecordedForward | None = None,
    ) -> None:
        self._recorded = recorded
        self._accept_buffered = accept
        self._note_accepted = note_accepted
        self._model = model
        self._caches = caches
        self._state = state
        self._sampler = sampler
        self._drafter = drafter
        weights = model.embeddings
        # Otherwise torch's own threads compute, and the helpers would take cores from them.
        self._has_helpers = weights.device.type == "cpu" and weights.dtype == torch.float32
        self._is_batched = RecordedForward.obstacle(model) is None

    def run(self, step: Step, prompts: PromptGraphs | None = None) -> StepTensors:
        """Run everything after ``prepare``. The model's pass is a replay if ``prompts`` are given, which the
        step has to fit."""
        return self.finish(step, *self._forward(step, prompts))

    def finish(self, step: Step, hidden: Tensor | None, decode_logits: Tensor | None) -> StepTensors:
        """Run everything after the model's pass, which gave ``hidden`` ``[n, H]`` and ``decode_logits``
        ``[R, T, V]``."""
        prefill_logits = None
        if decode_logits is not None and step.ends is None:
            token_ids, is_finite = self._sample_decode(step, decode_logits)
        else:
            token_ids = torch.zeros_like(step.write_slots, dtype=torch.int64)
            is_finite = torch.ones_like(step.write_slots, dtype=torch.bool)
            if decode_logits is not None:
                sampled = self._sample_decode(step, decode_logits)
                token_ids[: step.num_decode], is_finite[: step.num_decode] = sampled
            if step.ends is not None:
                prefill_logits = self._sample_prefill(step, step.ends, hidden, token_ids, is_finite)
                self._place_prefill(step, step.ends)
        self._accept(step, token_ids, is_finite)
        self._note_accepted(step)
        self._sampler.commit(step.rows, step.results, step.accepted, step.needs, forced=step.forced)
        self._drafter.draft(step, hidden)
        return StepTensors(hidden, decode_logits, prefill_logits)

    @property
    def is_recorded(self) -> bool:
        """Whether :meth:`finish` can be recorded on a CPU, if sampling needs no processing of logits."""
        return self._drafter.is_recorded

    def empty_logits(self, num_rows: int) -> Tensor:
        """Make the tensor to which all graphs write their logits, ``[num_rows, T, V]``."""
        tokens, vocab_size = self._state.tokens, self._model.config.vocab_size
        return torch.empty((num_rows, tokens.shape[1], vocab_size), device=tokens.device)

    def replays(self, step: Step) -> bool:
        """Return whether the model's pass over this step is recorded, or is recorded when the step runs."""
        return self._recorded is not None and step.ends is None

    def _forward(self, step: Step, prompts: PromptGraphs | None) -> tuple[Tensor | None, Tensor | None]:
        """Return hidden states of all tokens if anything reads them, and decode rows' logits ``[R, T, V]`` if
        any row samples."""
        if prompts is not None:
            return prompts.replay(step.batch), None
        if self._recorded is not None and step.ends is None:
            hidden, logits = self._recorded(step.batch)
        else:
            has_prompt = self._has_helpers and step.ends is not None
            with self._prompt_calls() if has_prompt else nullcontext():
                if not step.reads_hidden:
                    self._model.store(step.batch, self._caches)
                    return None, None
                hidden = self._model.forward(step.batch, self._caches)
            if not step.samples or not step.num_decode:
                return hidden, None
            logits = self._model.logits(hidden[: step.batch.num_decode_tokens], out=step.logits)
        return hidden, logits.view(step.num_decode, -1, logits.shape[-1]) if step.samples else None

    @contextmanager
    def _prompt_calls(self) -> Generator[None]:
        """Several threads make a CPU's kernel calls, if possible in batches: a prompt has many."""
        with cpu_threads().awake() as has_helpers:
            if not (has_helpers and self._is_batched):
                yield
                return
            with batched_calls():
                yield
            self._model.tp.transport.check()

    def _sample_decode(self, step: Step, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, shape = step.rows[: step.num_decode], logits.shape[:2]
        positions = step.batch.positions[: step.batch.num_decode_tokens].view(shape)
        inputs = step.batch.input_ids[: step.batch.num_decode_tokens].view(shape)
        return self._sampler.sample(logits, rows, positions, inputs, step.needs)

    def _sample_prefill(
        self, step: Step, ends: PrefillEnds, hidden: Tensor | None, token_ids: Tensor, is_finite: Tensor
    ) -> Tensor | None:
        sampling = ends.sampling
        if len(sampling.places) == 0:
            return None
        assert hidden is not None
        logits = self._model.logits(hidden[sampling.tokens])[:, None]
        sampled, finite = self._sampler.sample(
            logits, sampling.rows, sampling.positions, sampling.input_ids, step.needs
        )
        token_ids[sampling.places, 0] = sampled[:, 0]
        is_finite[sampling.places, 0] = finite[:, 0]
        return logits

    def _place_prefill(self, step: Step, ends: PrefillEnds) -> None:
        """Set prefill rows to one token before their end.

        Then acceptance advances them like decode rows of one position.
        """
        rows = step.rows[step.num_decode :]
        self._state.num_computed[rows] = ends.last_positions
        self._state.num_drafts.index_fill_(0, rows, 0)  # `[rows] = 0` would wait for the device

    def _accept(self, step: Step, token_ids: Tensor, is_finite: Tensor) -> None:
        accept = self._accept_buffered
        if step.ends is not None:
            accept = replace(
                accept,
                rows=step.rows,
                write_slots=step.write_slots,
                forced=step.forced,
                accepted=step.accepted,
                results=step.results,
            )
        accept(len(step.rows), sampled=token_ids, is_finite=is_finite)
