"""The model's pass over a short prompt as a CUDA graph.

A prompt of a few hundred tokens takes the GPU less time than Python needs to launch its kernels, of which a
layer has five to ten. So steps of one prompt row and nothing else are captured too, for several numbers of
tokens. A step is padded to the next of them: its last tokens belong to a second row, which is padding and
touches only the null block and the null slot.

A graph holds what the model computes. What comes before and behind it, sampling for example, is launched
call by call. The kernels launch as many programs as the padded step needs, and find the row's true length on
the device. Steps of several prompts, or with decode rows, are not captured.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.memory.caches import LayerCaches
from engine.models.batch import Batch, PrefillRows
from engine.models.causal_lm import CausalLM
from kernels.ssm.boundaries import Boundaries, Segments, segments_of

log = logging.getLogger(__name__)

MOST_BOUNDARIES = 8
"""Boundaries in a captured step: a prompt's branches and its last whole block are fewer, as a rule."""
WARM_UP_RUNS = 1
_PADDING = 1
"""The padding's row; the prompt's is 0."""
_SEGMENTS = 2 + MOST_BOUNDARIES


@dataclass(frozen=True)
class _Inputs:
    """A step of two rows, the prompt and the padding, at fixed addresses.

    The step has :data:`MOST_BOUNDARIES` boundaries and so many segments more than rows. Those that the prompt
    lacks are empty ones of the padding row. Integers are int32 but for tokens.
    """

    tokens: Tensor
    """``[3, most tokens]`` int64: input ids, positions, slot mapping"""
    rows: Tensor
    """``[4, 2]`` sequence lengths, slots to read, slots to write, tokens before"""
    cu_seqlens: Tensor
    has_initial: Tensor
    block_table: Tensor
    """``[2, columns]``"""
    cuts: Tensor
    """``[3, boundaries]`` rows, offsets, slots"""
    segments: Tensor
    """``[3, segments]`` slots to read, slots to write, tokens before"""
    cut_seqlens: Tensor
    cut_initial: Tensor
    row_starts: Tensor

    @classmethod
    def make(cls, most_tokens: int, columns: int, device: torch.device) -> _Inputs:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        row_starts = zeros(3)
        row_starts[2:].fill_(_SEGMENTS)
        return cls(
            tokens=zeros(3, most_tokens, dtype=torch.int64),
            rows=zeros(4, 2),
            cu_seqlens=zeros(3),
            has_initial=zeros(2, dtype=torch.bool),
            block_table=zeros(2, columns),
            cuts=zeros(3, MOST_BOUNDARIES),
            segments=zeros(3, _SEGMENTS),
            cut_seqlens=zeros(_SEGMENTS + 1),
            cut_initial=zeros(_SEGMENTS, dtype=torch.bool),
            row_starts=row_starts,
        )

    def batch(self, size: int, max_seq_len: int) -> Batch:
        """Make the step of ``size`` tokens."""
        input_ids, positions, slot_mapping = self.tokens[:, :size].unbind()
        seq_lens, read_slots, write_slots, num_before = self.rows.unbind()
        reads, writes, before = self.segments.unbind()
        cut_rows, offsets, slots = self.cuts.unbind()
        segments = Segments(
            self.cut_seqlens, reads, writes, self.cut_initial, before, self.row_starts, max_seq_len=size
        )
        rows = PrefillRows(
            num_rows=2,
            num_tokens=size,
            cu_seqlens=self.cu_seqlens,
            seq_lens=seq_lens,
            block_table=self.block_table,
            read_slots=read_slots,
            write_slots=write_slots,
            has_initial=self.has_initial,
            num_before=num_before,
            boundaries=Boundaries(cut_rows, offsets, slots, segments),
            max_query_len=size,
            max_seq_len=max_seq_len,
        )
        return Batch(input_ids, positions, slot_mapping, decode=None, prefill=rows)

    def clear(self, size: int) -> None:
        """Leave nothing but ``size`` tokens of the padding row, which is never written to a real place."""
        for one in (self.tokens, self.rows, self.cu_seqlens, self.has_initial, self.block_table):
            one.zero_()
        self.cu_seqlens[2:].fill_(size)
        rows = self.cu_seqlens[:2], *self.rows[1:3, :1], self.has_initial[:1]
        self._cut(None, segments_of(None, rows, self.rows[3, :1], 0), size)

    def load(self, batch: Batch, prompt: PrefillRows, size: int) -> None:
        """Copy a step of one prompt, whose tokens are padded to ``size``."""
        num_tokens = prompt.num_tokens
        each = batch.input_ids, batch.positions, batch.slot_mapping
        for place, values in zip(self.tokens, each, strict=True):
            place[:num_tokens].copy_(values)
        self.tokens[:, num_tokens:size].zero_()  # an earlier prompt's places would be overwritten
        fields = prompt.seq_lens, prompt.read_slots, prompt.write_slots, prompt.num_before
        self.rows[:, :1].copy_(torch.stack(fields))
        self.cu_seqlens[:2].copy_(prompt.cu_seqlens)
        self.cu_seqlens[2:].fill_(size)
        self.has_initial[:1].copy_(prompt.has_initial)
        self.block_table[:1, : prompt.block_table.shape[1]].copy_(prompt.block_table)
        rows = prompt.cu_seqlens, prompt.read_slots, prompt.write_slots, prompt.has_initial
        segments = segments_of(prompt.boundaries, rows, prompt.num_before, num_tokens)
        self._cut(prompt.boundaries, segments, size)

    def _cut(self, boundaries: Boundaries | None, segments: Segments, size: int) -> None:
        num_cuts = 0 if boundaries is None else len(boundaries.rows)
        self.cuts[:1, num_cuts:].fill_(_PADDING)
        self.cuts[1:, num_cuts:].zero_()
        if boundaries is not None:
            self.cuts[:, :num_cuts].copy_(
                torch.stack([boundaries.rows, boundaries.offsets, boundaries.slots])
            )
        own = num_cuts + 1
        assert segments.num_before is not None
        values = [segments.read_slots, segments.write_slots, segments.num_before]
        self.segments[:, :own].copy_(torch.stack(values))
        self.segments[:, own:].zero_()
        self.cut_seqlens[: own + 1].copy_(segments.cu_seqlens)
        self.cut_seqlens[own + 1 :].fill_(size)
        self.cut_initial[:own].copy_(segments.has_initial)
        self.cut_initial[own:].zero_()
        self.row_starts[1:2].fill_(own)


class PromptGraphs:
    """Graphs of steps of one prompt, by their number of tokens.

    With ``reads_hidden`` they end with the hidden states, otherwise with the last layer's KV or state.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: LayerCaches,
        *,
        sizes: list[int],
        columns: int,
        max_seq_len: int,
        reads_hidden: bool,
    ) -> None:
        self._model = model
        self._caches = caches
        self._sizes = sizes
        self._columns = columns
        self._max_seq_len = max_seq_len
        self._reads_hidden = reads_hidden
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def capture_all(self, pool: Any) -> None:
        """Capture every size, largest first: the others reuse its memory. ``pool`` is that of other graphs.

        Raises torch's out-of-memory error if a graph does not fit.
        """
        if not self._sizes or not self._model.embeddings.is_cuda:
            return
        began = time.monotonic()
        device, most = self._model.embeddings.device, self._sizes[-1]
        self._inputs = _Inputs.make(most, self._columns, device)
        hidden_size = self._model.config.hidden_size if self._reads_hidden else 0
        self._hidden = torch.empty(most, hidden_size, dtype=self._model.embeddings.dtype, device=device)
        for size in reversed(self._sizes):
            self._inputs.clear(size)
            for _ in range(WARM_UP_RUNS):
                self._run(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._run(size)
            self._captured[size] = graph
            pool = graph.pool()
        log.info("captured %d graphs of prompts in %.1f s", len(self._captured), time.monotonic() - began)

    def fits(self, batch: Batch, *, reads_hidden: bool) -> bool:
        """Return whether a graph was captured for this step. Nobody has to read the hidden states of one that
        has them."""
        prompt = batch.prefill
        if not self._captured or batch.decode is not None or prompt is None:
            return False
        num_boundaries = 0 if prompt.boundaries is None else len(prompt.boundaries.rows)
        is_small = prompt.num_tokens <= self._sizes[-1] and num_boundaries <= MOST_BOUNDARIES
        return prompt.num_rows == 1 and is_small and reads_hidden <= self._reads_hidden

    def replay(self, batch: Batch) -> Tensor | None:
        """Launch a step that :meth:`fits`. Returns its hidden states ``[n, H]`` if anything reads them.

        The next replay overwrites them.
        """
        prompt = batch.prefill
        assert prompt is not None
        size = next(one for one in self._sizes if one >= prompt.num_tokens)
        self._inputs.load(batch, prompt, size)
        self._captured[size].replay()
        return self._hidden[: prompt.num_tokens] if self._reads_hidden else None

    def _run(self, size: int) -> None:
        batch = self._inputs.batch(size, self._max_seq_len)
        if self._reads_hidden:
            self._hidden[:size].copy_(self._model.forward(batch, self._caches))
        else:
            self._model.store(batch, self._caches)
