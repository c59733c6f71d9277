"""The two drafters: the checkpoint's multi-token prediction layers, and n-gram look-up in earlier tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.memory.caches import LayerCaches
from engine.models.batch import Batch, DecodeRows
from engine.models.causal_lm import CausalLM
from engine.models.mtp import Mtp
from engine.request import Request
from engine.sampling.sampler import Sampler
from engine.step.buffers import StepBuffers
from engine.step.program import Step
from engine.step.row_progress import RowState
from kernels.speculation.ngram_draft import NgramDraft


class MtpDrafter:
    """Drafts with the MTP layers, looped ``num_drafts`` times. With 0 drafts it only fills the layers' KV.

    Position i of the MTP layers takes the target's hidden state i and token i + 1, and predicts token
    i + 2. The layers' KV is written for every token that a step computes. From the second draft on, the loop
    computes KV from guessed hidden states; the next step overwrites this KV.
    """

    is_recorded = False

    def __init__(
        self,
        model: CausalLM,
        caches: LayerCaches,
        state: RowState,
        sampler: Sampler,
        *,
        num_drafts: int,
        block_size: int,
    ) -> None:
        assert model.mtp is not None, "the model was loaded without its MTP layers"
        self._model = model
        self._mtp: Mtp = model.mtp
        self._caches = caches
        self._state = state
        self._sampler = sampler
        self._num_drafts = num_drafts
        self._block_size = block_size

    def fill(self, request: Request) -> None:
        pass

    def draft(self, step: Step, hidden: Tensor | None) -> None:
        assert hidden is not None
        hidden = self._mtp.forward(hidden, _next_ids(step), step.batch, self._caches)
        if self._num_drafts == 0:
            return
        rows = step.rows
        hidden = hidden[_last_tokens(step)]
        known = self._state.num_computed[rows].to(torch.int64)
        active = self._state.active[rows]
        for number in range(1, self._num_drafts + 1):
            logits = self._model.logits(hidden)
            drafts = self._sampler.draft(logits, rows, known + number, step.needs) * active
            self._state.tokens[rows, number] = drafts
            if number < self._num_drafts:
                batch = self._loop_batch(step, drafts, known + number - 1, active)
                hidden = self._mtp.forward(hidden, drafts, batch, self._caches)

    def _loop_batch(self, step: Step, drafts: Tensor, positions: Tensor, active: Tensor) -> Batch:
        """Make the batch of one turn of the loop: one position per row.

        Positions without a block use the null block.
        """
        size, columns = self._block_size, step.block_table.shape[1]
        column = (positions // size).clamp_(max=columns - 1)[:, None]
        blocks = step.block_table.gather(1, column)[:, 0].to(torch.int64)
        is_placed = active & (blocks > 0) & (positions < columns * size)
        num_rows = len(step.rows)
        unused = step.accepted.new_zeros(num_rows)
        lengths = [part.max_seq_len for part in (step.batch.decode, step.batch.prefill) if part is not None]
        rows = DecodeRows(
            num_rows=num_rows,
            num_positions=1,
            seq_lens=((positions + 1) * is_placed).to(torch.int32),
            block_table=step.block_table,
            read_slots=unused,
            write_slots=unused[:, None],
            max_seq_len=min(max(lengths) + self._num_drafts, columns * size),
        )
        slot_mapping = (blocks * size + positions % size) * is_placed
        return Batch(drafts, positions, slot_mapping, rows, None)


class NgramDrafter:
    """Finds an earlier place where the last tokens occur already, and drafts the tokens that follow there.

    It searches prompt and answer.
    """

    is_recorded = True

    def __init__(
        self, state: RowState, buffers: StepBuffers, *, max_model_len: int, min_n: int, max_n: int
    ) -> None:
        num_rows, device = len(state.active), state.active.device
        self._history = torch.zeros((num_rows, max_model_len), dtype=torch.int32, device=device)
        self._draft_buffered = NgramDraft(
            rows=buffers.rows.device,
            accepted=buffers.accepted,
            results=buffers.results,
            history=self._history,
            tokens=state.tokens,
            num_drafts=state.num_drafts,
            num_computed=state.num_computed,
            active=state.active,
            min_n=min_n,
            max_n=max_n,
        )

    def fill(self, request: Request) -> None:
        tokens = torch.tensor(request.tokens, dtype=torch.int32)
        if self._history.is_cuda:
            tokens = tokens.pin_memory()
        self._history[request.row, : len(tokens)].copy_(tokens, non_blocking=True)

    def draft(self, step: Step, hidden: Tensor | None) -> None:
        draft = self._draft_buffered
        if step.ends is not None:
            draft = replace(draft, rows=step.rows, accepted=step.accepted, results=step.results)
        draft(len(step.rows))


def _next_ids(step: Step) -> Tensor:
    """Return ``[n]`` int64: the successor of each of the step's ``n`` tokens.

    The entry is 0 for a rejected draft, and for a token whose successor is not known yet.
    """
    gained = step.results[: step.num_decode, 3:].reshape(-1)
    if step.ends is None:
        return gained
    next_ids = torch.cat([gained, step.ends.next_ids])
    next_ids[step.ends.last_tokens] = step.results[step.num_decode :, 3]
    return next_ids


def _last_tokens(step: Step) -> Tensor:
    """Return each row's last accepted token, as an int64 index among the step's tokens."""
    num_rows = step.num_decode
    decode = step.batch.decode
    if decode is None:
        assert step.ends is not None
        return step.ends.last_tokens
    starts = torch.arange(num_rows, device=step.rows.device) * decode.num_positions
    last = starts + (step.accepted[:num_rows] - 1).clamp_(min=0)
    return last if step.ends is None else torch.cat([last, step.ends.last_tokens])
