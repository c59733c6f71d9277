"""Builds a model's blocks from a checkpoint's tensors. Families call it with tensor names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.checkpoint.model_config import LayerType, ModelConfig
from engine.checkpoint.weights import Weights
from engine.models.block import Block, Mixer
from engine.models.layers.attention import Attention
from engine.models.layers.gated_delta_net import GatedDeltaNet
from engine.models.layers.mamba_mixer import MambaMixer
from engine.models.layers.mlp import Mlp, MlpNames
from engine.models.layers.moe import Moe, MoeNames
from engine.parallel.tensor_parallel import TensorParallel


class Builder:
    """Makes a model's norms, mixers and blocks. Tensor names are given without ``prefix``.

    Each layer with a cache gets the next cache of its kind.
    """

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, tp: TensorParallel) -> None:
        self.config = config
        self.weights = weights
        self.prefix = prefix
        self.tp = tp
        self._num_attention = 0
        self._num_recurrent = 0

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor."""
        return self.prefix + name in self.weights

    def block(self, norm: str, *mixers: Mixer) -> Block:
        """Build a block whose norm has the weight ``{norm}.weight``."""
        return Block(self.norm(norm), mixers)

    def norm(self, name: str) -> Tensor:
        """Load the weight ``[hidden]`` of an RMS norm over the hidden state."""
        name, shape = f"{self.prefix}{name}.weight", (self.config.hidden_size,)
        if self.config.norm_offset == 0.0:
            return self.weights.take(name, shape)
        return self.weights.take(name, shape, dtype=torch.float32) + self.config.norm_offset

    def mixer(self, layer_type: LayerType, name: str) -> Mixer:
        """Build the mixer whose tensor names start with ``name``."""
        make: dict[LayerType, Callable[[str], Mixer]] = {
            "mamba": self.mamba,
            "gated_delta": self.gated_delta,
            "attention": self.attention,
            "mlp": self.mlp,
            "moe": self.moe,
        }
        return make[layer_type](name)

    def mamba(self, name: str) -> MambaMixer:
        assert self.config.mamba is not None
        return MambaMixer(self.config.mamba, *self._next_recurrent(name))

    def gated_delta(self, name: str) -> GatedDeltaNet:
        assert self.config.gated_delta is not None
        return GatedDeltaNet(self.config.gated_delta, *self._next_recurrent(name))

    def _next_recurrent(self, name: str) -> tuple[int, float, Weights, str, TensorParallel, int]:
        """Return a recurrent mixer's constructor arguments that follow its own configuration."""
        index = self._num_recurrent
        self._num_recurrent += 1
        config = self.config
        return config.hidden_size, config.norm_eps, self.weights, self.prefix + name, self.tp, index

    def attention(self, name: str) -> Attention:
        config = self.config
        assert config.attention is not None
        mixer = Attention(
            config.attention,
            config.hidden_size,
            self.weights,
            self.prefix + name,
            self.tp,
            self._num_attention,
        )
        self._num_attention += 1
        return mixer

    def mlp(self, name: str, names: MlpNames | None = None) -> Mlp:
        config = self.config
        assert config.mlp is not None
        return Mlp(config.mlp, config.hidden_size, self.weights, self.prefix + name, self.tp, names)

    def moe(self, name: str, names: MoeNames | None = None) -> Moe:
        """Build a mixture of experts. ``names`` are Nemotron's by default."""
        config = self.config
        assert config.moe is not None
        return Moe(
            config.moe, config.hidden_size, self.weights, self.prefix + name, self.tp, names or MoeNames()
        )
