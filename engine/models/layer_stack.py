"""Layers of one mixer each, with a residual stream, and the norm after the last of them.

r = r + mixer_i(rms_norm_i(r))        for every layer i
x = rms_norm_last(r)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.batch import Batch
from engine.caches import LayerCaches
from engine.model_config import LayerType, ModelConfig
from engine.models.attention import Attention
from engine.models.mamba_mixer import MambaMixer
from engine.models.mlp import Mlp
from engine.models.moe import Moe
from engine.tensor_parallel import TensorParallel
from engine.weights import Weights
from kernels.rms_norm import add_rms_norm, rms_norm

Mixer = MambaMixer | Attention | Mlp | Moe


class LayerStack:
    """Norms and mixers of ``{prefix}layers.0 …``; the last norm is the one named ``last_norm``."""

    def __init__(
        self,
        layer_types: Sequence[LayerType],
        config: ModelConfig,
        weights: Weights,
        prefix: str,
        last_norm: str,
        tp: TensorParallel,
    ) -> None:
        self.eps = config.norm_eps
        self.residual_in_fp32 = config.residual_in_fp32
        self.norms: list[Tensor] = []
        self.mixers: list[Mixer] = []
        for index, layer_type in enumerate(layer_types):
            self.norms.append(weights.take(f"{prefix}layers.{index}.norm.weight", (config.hidden_size,)))
            self.mixers.append(_load_mixer(layer_type, config, weights, f"{prefix}layers.{index}.mixer.", tp))
        self.last_norm = weights.take(f"{prefix}{last_norm}.weight", (config.hidden_size,))

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """``[n, hidden]`` into the residual stream to ``[n, hidden]`` after the last norm.

        Each layer takes the next cache of its kind. There may be more caches than layers.
        """
        residual = x.float() if self.residual_in_fp32 else x
        x = rms_norm(x, self.norms[0], self.eps)
        mamba_states = zip(caches.conv, caches.ssm, strict=True)
        kv_caches = zip(caches.k, caches.v, strict=True)
        for mixer, next_norm in zip(self.mixers, [*self.norms[1:], self.last_norm], strict=True):
            if isinstance(mixer, MambaMixer):
                x = mixer.forward(x, batch, *next(mamba_states))
            elif isinstance(mixer, Attention):
                x = mixer.forward(x, batch, *next(kv_caches))
            else:
                x = mixer.forward(x)
            x, residual = add_rms_norm(x, residual, next_norm, self.eps)
        return x


def _load_mixer(
    layer_type: LayerType, config: ModelConfig, weights: Weights, prefix: str, tp: TensorParallel
) -> Mixer:
    hidden = config.hidden_size
    if layer_type == "mamba":
        return MambaMixer(config.mamba, hidden, config.norm_eps, weights, prefix, tp)
    if layer_type == "attention":
        return Attention(config.attention, hidden, weights, prefix, tp)
    if layer_type == "moe":
        assert config.moe is not None
        return Moe(config.moe, hidden, weights, prefix, tp)
    assert config.mlp is not None
    return Mlp(hidden, config.mlp.intermediate_size, config.mlp.bias, weights, prefix, tp)
