"""A language model: embedding, the family's blocks, output head.

r = scale_e * embedding(tokens)
logits = scale_l * lm_head(blocks(r))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WHOLE, Weights, of_outputs
from engine.memory.caches import LayerCaches
from engine.models.batch import Batch
from engine.models.block import BlockStack
from engine.models.builder import Builder
from engine.models.family import Family
from engine.models.layers.gated_delta_net import GatedDeltaNet
from engine.models.layers.linear import Linear
from engine.models.layers.mamba_mixer import MambaMixer
from engine.models.layers.moe import Moe
from engine.models.mtp import Mtp
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from kernels.linear.embedding import embedding
from kernels.linear.quantized_weight import QuantizedWeight, quantized_by_rows


class CausalLM:
    """Weights and forward pass. It owns no state of sequences: every call is given caches and batch."""

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        weights: Weights,
        *,
        mtp: bool = False,
        tp: TensorParallel = ALONE,
    ) -> None:
        self.config = config
        self.tp = tp
        table = f"{family.embedding}.weight"
        prefix = next((p for p in family.prefixes if p + table in weights), family.prefixes[0])
        self.embeddings = weights.take(prefix + table, (config.vocab_size, config.hidden_size))
        build = Builder(config, weights, prefix, tp)
        self.layers = BlockStack(family.blocks(build), build.norm(family.last_norm), config, tp)
        self.lm_head = Linear(
            head_rows(config, weights, tp, tied=self.embeddings),
            scale=config.logit_scale,
            batch_invariant=weights.batch_invariant,
            weight_dtype=weights.weight_dtype,
        )
        self.mtp = Mtp(family, config, weights, self.embeddings, tp) if mtp else None

    @property
    def recurrent_layers(self) -> list[MambaMixer | GatedDeltaNet]:
        """The mixers that keep states, in the order of their states in the caches."""
        mixers = (mixer for block in self.layers.blocks for mixer in block.mixers)
        found = [mixer for mixer in mixers if isinstance(mixer, MambaMixer | GatedDeltaNet)]
        return sorted(found, key=lambda mixer: mixer.index)

    @property
    def expert_layers(self) -> list[Moe]:
        """The mixers that are mixtures of experts."""
        mixers = (mixer for block in self.layers.blocks for mixer in block.mixers)
        return [mixer for mixer in mixers if isinstance(mixer, Moe)]

    def warm_up(self) -> None:
        """Compile the experts' kernels for all numbers of tokens, so that no request waits for that. Layers
        share their programs."""
        for experts in self.expert_layers[:1]:
            experts.warm_up(self.embeddings.dtype)

    def forward(self, batch: Batch, caches: LayerCaches) -> Tensor:
        """Run all tokens of ``batch`` and update the caches.

        The model's attention layers use the first KV caches; the MTP layer uses the last ones. Returns the
        hidden states after the last norm, ``[n, hidden]``. The outputs of padding tokens are finite.
        """
        return self.layers.forward(self._embedded(batch), batch, caches)

    def store(self, batch: Batch, caches: LayerCaches) -> None:
        """Update the caches as :meth:`forward` does, for tokens whose hidden states nobody reads."""
        self.layers.store(self._embedded(batch), batch, caches)

    def _embedded(self, batch: Batch) -> Tensor:
        return embedding(batch.input_ids, self.embeddings, scale=self.config.embedding_scale)

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Map hidden states ``[m, hidden]`` to logits ``[m, vocab]`` float32, written to ``out`` if given.

        The hidden states have passed the last norm, either the model's or the MTP layer's.
        """
        logits = self.tp.gather_columns(self.lm_head(hidden), self.config.vocab_size)
        return logits.to(torch.float32) if out is None else out.view(logits.shape).copy_(logits)


def head_rows(
    config: ModelConfig, weights: Weights, tp: TensorParallel, *, tied: Tensor
) -> Tensor | QuantizedWeight:
    """Return this rank's rows of the output head ``[vocab, hidden]``.

    Each rank has the same number of rows; rows after the end of the vocabulary are zeros. ``tied`` is the
    embedding, which serves as the head if the checkpoint has no head of its own.
    """
    each = -(-config.vocab_size // tp.size)
    start, stop = (min(rank * each, config.vocab_size) for rank in (tp.rank, tp.rank + 1))
    # A tied checkpoint usually leaves lm_head out. If it stores lm_head, that tensor was trained: use it.
    is_stored = any(f"lm_head.{name}" in weights for name in ("weight", "weight_packed"))
    rows: Tensor | QuantizedWeight
    if config.tie_word_embeddings and not is_stored:
        rows = tied if tp.size == 1 else tied[start:stop]
        if weights.weight_dtype == "int8":
            rows = quantized_by_rows(rows)
    else:
        part = WHOLE if tp.size == 1 else of_outputs((start, stop))
        rows = weights.take_weight("lm_head", (config.vocab_size, config.hidden_size), part=part)
    if isinstance(rows, QuantizedWeight):
        return rows.rows_padded(each)
    return rows if len(rows) == each else F.pad(rows, (0, 0, 0, each - len(rows)))
