"""A language model: embedding, blocks of some family, output head.

r = scale_e * embedding(tokens)
logits = scale_l * lm_head(blocks(r))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.caches import LayerCaches
from engine.model_config import ModelConfig
from engine.models.block import BlockStack
from engine.models.builder import Builder
from engine.models.family import Family
from engine.models.linear import Linear
from engine.models.mtp import Mtp
from engine.tensor_parallel import ALONE, TensorParallel
from engine.weights import WHOLE, Weights, of_outputs
from kernels.embedding import embedding


class CausalLM:
    """Weights and forward pass. It owns no sequence state: caches and batch come with every call."""

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
        self.lm_head = Linear(self._head(weights), scale=config.logit_scale)
        self.mtp = Mtp(family, config, weights, self.embeddings, tp) if mtp else None

    def _head(self, weights: Weights) -> Tensor:
        """This rank's rows of ``[vocab, hidden]``, as many on each rank: the last has zeros at its end."""
        config, (rank, size) = self.config, (self.tp.rank, self.tp.size)
        each = -(-config.vocab_size // size)
        start, stop = min(rank * each, config.vocab_size), min((rank + 1) * each, config.vocab_size)
        # A tied checkpoint usually leaves lm_head out; where it is stored, it is what was trained.
        if config.tie_word_embeddings and "lm_head.weight" not in weights:
            rows = self.embeddings if size == 1 else self.embeddings[start:stop]
        else:
            part = WHOLE if size == 1 else of_outputs((start, stop))
            rows = weights.take("lm_head.weight", (config.vocab_size, config.hidden_size), part=part)
        return rows if len(rows) == each else F.pad(rows, (0, 0, 0, each - len(rows)))

    def forward(self, batch: Batch, caches: LayerCaches) -> Tensor:
        """Runs all tokens of ``batch`` and brings the caches up to date.

        Attention takes the first KV caches; those after them are the MTP layer's. Returns the hidden
        states after the last norm, ``[n, hidden]``. Padding tokens come out finite.
        """
        x = embedding(batch.input_ids, self.embeddings, scale=self.config.embedding_scale)
        return self.layers.forward(x, batch, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[m, hidden]`` after the last norm, the MTP layer's too, to ``[m, vocab]`` float32."""
        logits = self.tp.gather_columns(self.lm_head(hidden))
        return logits[:, : self.config.vocab_size].to(torch.float32)
