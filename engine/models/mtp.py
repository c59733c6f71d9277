"""The multi-token prediction layer that drafts (after DeepSeek-V3, arXiv:2412.19437, section 2.2).

    x_i = eh_proj([rms_norm_e(embedding(token i + 1)), rms_norm_h(hidden_i)])
    r_i = x_i;  r_i = r_i + mixer_j(rms_norm_j(r_i))        for every sublayer j
    out_i = rms_norm_final(r_i)

``hidden_i`` is the target model's hidden state after its last norm. ``lm_head(out_i)`` predicts token i + 2.
Looping gives further drafts: ``out_i`` and the token just drafted are the input of position i + 1, and so on.
The layer shares the target's embedding and ``lm_head``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import Weights
from engine.memory.caches import LayerCaches
from engine.models.batch import Batch
from engine.models.block import BlockStack
from engine.models.builder import Builder
from engine.models.family import Family
from engine.models.layers.linear import Linear
from engine.parallel.tensor_parallel import TensorParallel
from kernels.norms.rms_norm import rms_norm

PREFIX = "mtp."


class Mtp:
    """Weights and forward pass. The layer's attention has its own KV, in the last KV caches of the pool."""

    def __init__(
        self, family: Family, config: ModelConfig, weights: Weights, embeddings: Tensor, tp: TensorParallel
    ) -> None:
        mtp, names = config.require_mtp(), family.mtp
        assert names is not None
        build = Builder(config, weights, PREFIX, tp)
        self.eps = config.norm_eps
        self.num_attention = mtp.layer_types.count("attention")
        self.embeddings = embeddings
        blocks = list(names.blocks(build))
        self.embedding_norm = build.norm(names.embedding_norm)
        self.hidden_norm = build.norm(names.hidden_norm)
        hidden = config.hidden_size
        self.joined_proj = Linear.take(weights, f"{PREFIX}{names.joined_proj}", hidden, 2 * hidden)
        self.layers = BlockStack(blocks, build.norm(names.last_norm(config)), config, tp)

    def forward(self, hidden: Tensor, next_ids: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Run the positions of ``batch`` and store their KV. The ``input_ids`` of ``batch`` are not used.

        hidden ``[n, hidden]``: the target's output at each position; in a loop, this layer's output at the
        previous position. next_ids ``[n]`` int64: the token at each position + 1. Returns ``[n, hidden]``;
        :meth:`CausalLM.logits` turns it into logits of the token at position + 2.
        """
        embedded = rms_norm(F.embedding(next_ids, self.embeddings), self.embedding_norm, self.eps)
        fused = torch.cat([embedded, rms_norm(hidden, self.hidden_norm, self.eps)], dim=-1)
        return self.layers.forward(self.joined_proj(fused), batch, self._own(caches))

    def _own(self, caches: LayerCaches) -> LayerCaches:
        first = len(caches.k) - self.num_attention
        return LayerCaches(k=caches.k[first:], v=caches.v[first:], conv=[], ssm=[])
