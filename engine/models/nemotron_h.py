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
from engine.model_config import LayerType, ModelConfig
from engine.models.attention import Attention
from engine.models.linear import Linear
from engine.models.mamba_mixer import MambaMixer
from engine.models.mlp import Mlp
from engine.models.moe import Moe
from engine.weights import WeightFiles
from kernels.rms_norm import add_rms_norm, rms_norm

PREFIXES = ("backbone.", "model.")
"""As published, and as transformers 5 may save it."""

Mixer = MambaMixer | Attention | Mlp | Moe


class NemotronH:
    """Weights and forward pass. It owns no sequence state: caches and batch come with every call."""

    def __init__(self, config: ModelConfig, weights: WeightFiles) -> None:
        self.config = config
        hidden = config.hidden_size
        prefix = next((p for p in PREFIXES if f"{p}embeddings.weight" in weights), PREFIXES[0])
        self.embeddings = weights.take(f"{prefix}embeddings.weight", (config.vocab_size, hidden))
        self.norms: list[Tensor] = []
        self.mixers: list[Mixer] = []
        for index, layer_type in enumerate(config.layer_types):
            self.norms.append(weights.take(f"{prefix}layers.{index}.norm.weight", (hidden,)))
            self.mixers.append(_load_mixer(layer_type, config, weights, f"{prefix}layers.{index}.mixer."))
        self.norm_f = weights.take(f"{prefix}norm_f.weight", (hidden,))
        # A tied checkpoint usually leaves lm_head out; where it is stored, it is what was trained.
        if config.tie_word_embeddings and "lm_head.weight" not in weights:
            self.lm_head = Linear(self.embeddings)
        else:
            self.lm_head = Linear.take(weights, "lm_head", config.vocab_size, hidden)

    def forward(self, batch: Batch, caches: LayerCaches) -> Tensor:
        """Runs all tokens of ``batch`` and brings the caches up to date.

        Returns the hidden states after the last norm, ``[n, hidden]``. Padding tokens come out finite.
        """
        eps = self.config.norm_eps
        embedded = F.embedding(batch.input_ids, self.embeddings)
        residual = embedded.float() if self.config.residual_in_fp32 else embedded
        x = rms_norm(embedded, self.norms[0], eps)
        mamba_states = zip(caches.conv, caches.ssm, strict=True)
        kv_caches = zip(caches.k, caches.v, strict=True)
        for mixer, next_norm in zip(self.mixers, [*self.norms[1:], self.norm_f], strict=True):
            if isinstance(mixer, MambaMixer):
                x = mixer.forward(x, batch, *next(mamba_states))
            elif isinstance(mixer, Attention):
                x = mixer.forward(x, batch, *next(kv_caches))
            else:
                x = mixer.forward(x)
            x, residual = add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """``[m, hidden]`` after the last norm to ``[m, vocab]`` float32."""
        return self.lm_head(hidden).to(torch.float32)


def _load_mixer(layer_type: LayerType, config: ModelConfig, weights: WeightFiles, prefix: str) -> Mixer:
    hidden = config.hidden_size
    if layer_type == "mamba":
        return MambaMixer(config.mamba, hidden, config.norm_eps, weights, prefix)
    if layer_type == "attention":
        return Attention(config.attention, hidden, weights, prefix)
    if layer_type == "moe":
        assert config.moe is not None
        return Moe(config.moe, hidden, weights, prefix)
    assert config.mlp is not None
    return Mlp(hidden, config.mlp.intermediate_size, config.mlp.bias, weights, prefix)
