"""The feed-forward layer: squared ReLU (Primer, arXiv:2109.08668) or SwiGLU (arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.mixer_config import MlpConfig
from engine.checkpoint.weights import Weights, of_inputs, of_outputs
from engine.memory.caches import LayerCaches
from engine.models.batch import Batch
from engine.models.layers.linear import Linear
from engine.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class MlpNames:
    """A family's names of the projections."""

    inputs: tuple[str, ...]
    """A gated layer has the names of gate and up, or one name of a tensor that holds first gate, then up. Any
    other layer has the name of up."""
    output: str = "down_proj"


PLAIN = MlpNames(("up_proj",))
GATED = MlpNames(("gate_proj", "up_proj"))


class Mlp:
    """``down(act(up(x)))``; a rank has a share of the intermediate channels.

    In a gated layer the outputs of ``self.up_proj`` are the gates, followed by the values that they multiply.
    """

    def __init__(
        self,
        config: MlpConfig,
        hidden_size: int,
        weights: Weights,
        prefix: str,
        tp: TensorParallel,
        names: MlpNames | None = None,
    ) -> None:
        """``names`` are those of most families by default."""
        if names is None:
            names = GATED if config.is_gated else PLAIN
        share = tp.share(config.intermediate_size)
        self.activation = config.activation
        self.up_proj = _load_up(config, hidden_size, weights, prefix, names, share)
        self.down_proj = Linear.take(
            weights,
            prefix + names.output,
            hidden_size,
            config.intermediate_size,
            bias=config.bias and tp.rank == 0,
            part=of_inputs((share.start, share.stop)),
            scale=config.out_scale,
        )

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """See :class:`engine.models.block.Mixer`."""
        return self(x)

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[n, hidden]`` to ``[n, hidden]``. With several ranks each rank returns one summand."""
        return self.down_proj(self.up_proj.activated(x, self.activation))


def _load_up(
    config: MlpConfig, hidden_size: int, weights: Weights, prefix: str, names: MlpNames, share: range
) -> Linear:
    size = config.intermediate_size
    gates, ups = (share.start, share.stop), (size + share.start, size + share.stop)
    scale = _up_scale(config, len(share), weights.device)
    if config.is_gated and len(names.inputs) == 1:
        return Linear.take(
            weights,
            prefix + names.inputs[0],
            2 * size,
            hidden_size,
            bias=config.bias,
            part=of_outputs(gates, ups),
            scale=scale,
        )
    layers = [(prefix + name, size, of_outputs(gates)) for name in names.inputs]
    return Linear.take_joined(weights, layers, hidden_size, bias=config.bias, scale=scale)


def _up_scale(config: MlpConfig, size: int, device: torch.device) -> float | Tensor:
    """Return one factor per channel ``[2 * size]`` if gates are scaled, else 1."""
    if config.gate_scale == 1.0:
        return 1.0
    factors = torch.tensor((config.gate_scale, 1.0), device=device)
    return factors.repeat_interleave(size)
