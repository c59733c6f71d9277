"""Nemotron-H: Mamba-2, attention and MLP or MoE layers in any order (arXiv:2504.03624).

    r = embedding(tokens)
    r = r + mixer_i(rms_norm_i(r))        for every layer i
    logits = lm_head(rms_norm_f(r))

Every layer holds one mixer and nothing else. There is no positional encoding: order comes from the
Mamba layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.caches import LayerCaches
from engine.model_config import ModelConfig
from engine.models.layer_stack import LayerStack
from engine.models.linear import Linear
from engine.models.mtp import Mtp
from engine.tensor_parallel import ALONE, TensorParallel
from engine.weights import Weights
from kernels.embedding import embedding

PREFIXES = ("backbone.", "model.")
"""As published, and as transformers 5 may save it."""


class NemotronH:
    """Weights and forward pass. It owns no sequence state: caches and batch come with every call."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        mtp: bool = False,
        tp: TensorParallel = ALONE,
    ) -> None:
        self.config = config
        self.tp = tp
        hidden = config.hidden_size
        prefix = next((p for p in PREFIXES if f"{p}embeddings.weight" in weights), PREFIXES[0])
        self.embeddings = weights.take(f"{prefix}embeddings.weight", (config.vocab_size, hidden))
        self.layers = LayerStack(config.layer_types, config, weights, prefix, "norm_f", tp)
        # A tied checkpoint usually leaves lm_head out; where it is stored, it is what was trained.
        if config.tie_word_embeddings and "lm_head.weight" not in weights:
            self.lm_head = Linear(self._vocabulary_share(self.embeddings))
        elif tp.size == 1:
            self.lm_head = Linear.take(weights, "lm_head", config.vocab_size, hidden)
        else:
            head = weights.take("lm_head.weight", (config.vocab_size, hidden))
            self.lm_head = Linear(self._vocabulary_share(head))
        self.mtp = Mtp(config, weights, self.embeddings, tp) if mtp else None

    def _vocabulary_share(self, weight: Tensor) -> Tensor:
        """This rank's rows of ``[vocab, hidden]``, as many on each rank: the last has zeros at its end."""
        if self.tp.size == 1:
            return weight
        each = -(-len(weight) // self.tp.size)
        rows = weight[self.tp.rank * each : (self.tp.rank + 1) * each]
        return rows if len(rows) == each else F.pad(rows, (0, 0, 0, each - len(rows)))

    def forward(self, batch: Batch, caches: LayerCaches) -> Tensor:
        """Runs all tokens of ``batch`` and brings the caches up to date.

        Attention takes the first KV caches; those after them are the MTP layer's. Returns the hidden
        states after the last norm, ``[n, hidden]``. Padding tokens come out finite.
        """
        return self.layers.forward(embedding(batch.input_ids, self.embeddings), batch, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[m, hidden]`` after the last norm, the MTP layer's too, to ``[m, vocab]`` float32."""
        logits = self.tp.gather_columns(self.lm_head(hidden))
        return logits[:, : self.config.vocab_size].to(torch.float32)
