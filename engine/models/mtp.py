"""The multi-token prediction layer that drafts (after DeepSeek-V3, arXiv:2412.19437, section 2.2).

    x_i = eh_proj([rms_norm_e(embedding(token i + 1)), rms_norm_h(hidden_i)])
    r_i = x_i;  r_i = r_i + mixer_j(rms_norm_j(r_i))        for every sublayer j
    out_i = rms_norm_final(r_i)

``hidden_i`` is the target's hidden state after its last norm; ``lm_head(out_i)`` is about token i + 2.
Further drafts come of looping: ``out_i`` with the token just drafted is position i + 1, and so on.
Embedding and ``lm_head`` are the target's.
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
from engine.tensor_parallel import TensorParallel
from engine.weights import Weights
from kernels.rms_norm import rms_norm
from wire.errors import ModelLoadError

PREFIX = "mtp."


class Mtp:
    """Weights and forward pass. Its attention keeps KV of its own, in the last KV caches of the pool."""

    def __init__(self, config: ModelConfig, weights: Weights, embeddings: Tensor, tp: TensorParallel) -> None:
        mtp = config.require_mtp()
        _refuse_further_sets(mtp.num_predictions, len(mtp.layer_types), weights)
        hidden, last = config.hidden_size, len(mtp.layer_types) - 1
        self.eps = config.norm_eps
        self.num_attention = mtp.layer_types.count("attention")
        self.embeddings = embeddings
        self.embedding_norm = weights.take(f"{PREFIX}layers.0.enorm.weight", (hidden,))
        self.hidden_norm = weights.take(f"{PREFIX}layers.0.hnorm.weight", (hidden,))
        self.eh_proj = Linear.take(weights, f"{PREFIX}layers.0.eh_proj", hidden, 2 * hidden)
        self.layers = LayerStack(
            mtp.layer_types, config, weights, PREFIX, last_norm=f"layers.{last}.final_layernorm", tp=tp
        )

    def forward(self, hidden: Tensor, next_ids: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Runs the positions of ``batch``, whose ``input_ids`` it does not look at, and stores their KV.

        hidden ``[n, hidden]``: the target's output at each position, or this layer's at the one before
        when looping; next_ids ``[n]`` int64: the token at each position + 1. Returns ``[n, hidden]``,
        which :meth:`NemotronH.logits` turns into logits of the token at position + 2.
        """
        embedded = rms_norm(F.embedding(next_ids, self.embeddings), self.embedding_norm, self.eps)
        fused = torch.cat([embedded, rms_norm(hidden, self.hidden_norm, self.eps)], dim=-1)
        return self.layers.forward(self.eh_proj(fused), batch, self._own(caches))

    def _own(self, caches: LayerCaches) -> LayerCaches:
        first = len(caches.k) - self.num_attention
        return LayerCaches(k=caches.k[first:], v=caches.v[first:], conv=[], ssm=[])


def _refuse_further_sets(num_predictions: int, num_layers: int, weights: Weights) -> None:
    """One set of layers is looped. Where each prediction has its own, looping the first is another model."""
    further = f"{PREFIX}layers.{num_layers}.enorm.weight"
    if num_predictions > 1 and further in weights:
        raise ModelLoadError(
            f"{weights.directory}: num_nextn_predict_layers is {num_predictions} and each prediction has MTP "
            f"layers of its own (there is {further}); only one set, looped, is supported. Use --drafter ngram"
        )
