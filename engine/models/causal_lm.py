"""A language model: embedding, blocks of some family, output head.

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
from engine.models.layers.linear import Linear
from engine.models.mtp import Mtp
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from kernels.linear.embedding import embedding
from kernels.linear.quantized_weight import QuantizedWeight


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
        self.lm_head = Linear(head_rows(config, weights, tp, tied=self.embeddings), scale=config.logit_scale)
        self.mtp = Mtp(family, config, weights, self.embeddings, tp) if mtp else None

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


def head_rows(
    config: ModelConfig, weights: Weights, tp: TensorParallel, *, tied: Tensor
) -> Tensor | QuantizedWeight:
    """This rank's rows of the output head ``[vocab, hidden]``, as many on each rank: the last has zeros at
    its end. ``tied``: the embedding, which is the head of a checkpoint that has none of its own.
    """
    each = -(-config.vocab_size // tp.size)
    start, stop = (min(rank * each, config.vocab_size) for rank in (tp.rank, tp.rank + 1))
    # A tied checkpoint usually leaves lm_head out; where it is stored, it is what was trained.
    is_stored = any(f"lm_head.{name}" in weights for name in ("weight", "weight_packed"))
    rows: Tensor | QuantizedWeight
    if config.tie_word_embeddings and not is_stored:
        rows = tied if tp.size == 1 else tied[start:stop]
    else:
        part = WHOLE if tp.size == 1 else of_outputs((start, stop))
        rows = weights.take_weight("lm_head", (config.vocab_size, config.hidden_size), part=part)
    if isinstance(rows, QuantizedWeight):
        return rows.rows_padded(each)
    return rows if len(rows) == each else F.pad(rows, (0, 0, 0, each - len(rows)))
