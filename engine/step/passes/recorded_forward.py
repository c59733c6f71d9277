"""The model's pass over decode rows on a CPU, recorded once per batch size and replayed without Python.

This corresponds to step graphs on a GPU (:mod:`engine.step.graph`), but covers only the forward
pass, which takes nearly all of a step's time on a CPU. Inputs are in the step buffers, whose addresses never
change. Outputs are in tensors that belong to the recording. Sampling and acceptance follow as ordinary calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.memory.caches import LayerCaches
from engine.models.batch import Batch
from engine.models.causal_lm import CausalLM
from kernels.cpu.graph import CpuGraph


@dataclass(frozen=True)
class _Recorded:
    graph: CpuGraph
    batch: Batch
    hidden: Tensor
    logits: Tensor


class RecordedForward:
    """Recorded passes over decode rows, by the number of rows and the number of positions in each row."""

    def __init__(self, model: CausalLM, caches: LayerCaches) -> None:
        self._model = model
        self._caches = caches
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    @staticmethod
    def obstacle(model: CausalLM) -> str | None:
        """Return why passes of this model can't be recorded; None if they can."""
        config = model.config
        if model.embeddings.device.type != "cpu":
            return "the model is not on a CPU"
        if model.embeddings.dtype != torch.float32:
            return f"its weights are {model.embeddings.dtype}, only torch.float32 has kernels for it"
        if not model.tp.transport.is_recorded:
            return "its tensor-parallel ranks exchange their sums in messages"
        if config.mamba is not None and config.mamba.norm_groups % model.tp.size:
            return "its tensor-parallel ranks share groups of a norm"
        if not all(experts.is_recorded for experts in model.expert_layers):
            return "the host chooses its experts, which are quantised or distributed over ranks"
        return None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits of all positions. The next call may overwrite both.

        For R rows of T positions their shapes are ``[R * T, hidden]`` and ``[R * T, vocab]``. ``batch`` must
        consist of views of the step buffers.
        """
        decode = batch.decode
        assert decode is not None
        assert batch.prefill is None
        key = decode.num_rows, decode.num_positions
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(batch)
        else:
            assert recorded.batch.input_ids.data_ptr() == batch.input_ids.data_ptr()
            recorded.graph.replay()
            self.check()
        return recorded.hidden, recorded.logits

    def check(self) -> None:
        """Raise :class:`wire.errors.GroupLostError` if the last results are undefined: a rank is gone."""
        self._model.tp.transport.check()

    def graph(self, num_rows: int, num_positions: int) -> CpuGraph:
        """Return the recording for so many rows and positions, which have run before."""
        return self._recorded[num_rows, num_positions].graph

    def _record(self, batch: Batch) -> _Recorded:
        graph = CpuGraph()
        with graph.record():
            hidden = self._model.forward(batch, self._caches)
            logits = self._model.logits(hidden)
        return _Recorded(graph, batch, hidden, logits)
