"""Blocks with a residual stream between them, and the norm after the last of them.

r = r + scale * sum of mixers(rms_norm_i(r))        for every block i
x = rms_norm_last(r)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.checkpoint.model_config import ModelConfig
from engine.memory.caches import LayerCaches
from engine.models.batch import Batch
from engine.parallel.tensor_parallel import TensorParallel
from kernels.norms.add import add
from kernels.norms.rms_norm import add_rms_norm, rms_norm


class Mixer(Protocol):
    """A part of a block: attention, a recurrent layer, an MLP or a mixture of experts."""

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Map ``[n, hidden]`` to ``[n, hidden]``. With tensor parallelism each rank returns one summand."""


@runtime_checkable
class StoringMixer(Mixer, Protocol):
    """A mixer with KV or states of its own: attention or a recurrent layer."""

    def store(self, x: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """Update the caches as :meth:`forward` does, without the work that only its output needs."""


@dataclass(frozen=True)
class Block:
    """One norm and the mixers that read the norm's output. Most blocks have one mixer."""

    norm: Tensor
    """``[hidden]``"""
    mixers: tuple[Mixer, ...]

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches, tp: TensorParallel) -> Tensor:
        """Map ``x`` ``[n, hidden]``, which is normalized already, to the residual stream's next summand."""
        first, *others = self.mixers
        total = first.forward(x, batch, caches)
        for mixer in others:
            total = add(total, mixer.forward(x, batch, caches))
        return tp.sum(total)


class BlockStack:
    """A sequence of blocks and the norm after the last one."""

    def __init__(
        self, blocks: Iterable[Block], last_norm: Tensor, config: ModelConfig, tp: TensorParallel
    ) -> None:
        self.tp = tp
        self.eps = config.norm_eps
        self.residual_in_fp32 = config.residual_in_fp32
        self.residual_scale = config.residual_scale
        self.blocks = list(blocks)
        self.last_norm = last_norm
        storing = [[one for one in block.mixers if isinstance(one, StoringMixer)] for block in self.blocks]
        self._last_storing = max((number for number, mixers in enumerate(storing) if mixers), default=-1)
        self._last_mixers = storing[self._last_storing]

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Map the start of the residual stream ``[n, hidden]`` to the last norm's output ``[n, hidden]``."""
        return self._normed_after(len(self.blocks), x, batch, caches)

    def store(self, x: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """Update all caches as :meth:`forward` does. Nothing behind the last KV or state is computed."""
        if self._last_storing < 0:  # an MTP layer may be experts alone
            return
        x = self._normed_after(self._last_storing, x, batch, caches)
        for mixer in self._last_mixers:
            mixer.store(x, batch, caches)

    def _normed_after(self, num_blocks: int, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Run the first blocks and the norm that follows them."""
        residual = x.float() if self.residual_in_fp32 else x
        first_norm, *next_norms = *(block.norm for block in self.blocks), self.last_norm
        x = rms_norm(x, first_norm, self.eps)
        for block, next_norm in zip(self.blocks[:num_blocks], next_norms, strict=False):
            x = block.forward(x, batch, caches, self.tp)
            x, residual = add_rms_norm(x, residual, next_norm, self.eps, scale=self.residual_scale)
        return x
