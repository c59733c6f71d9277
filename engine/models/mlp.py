"""The feed-forward layer with squared ReLU (Primer, arXiv:2109.08668)."""

from __future__ import annotations

from torch import Tensor

from engine.batch import Batch
from engine.caches import LayerCaches
from engine.models.linear import Linear
from engine.tensor_parallel import TensorParallel
from engine.weights import Weights, of_inputs, of_outputs


class Mlp:
    """``down(relu(up(x))^2)``; a rank has a share of the intermediate channels."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        weights: Weights,
        prefix: str,
        tp: TensorParallel,
    ) -> None:
        share = tp.share(intermediate_size)
        part = share.start, share.stop
        self.up_proj = Linear.take(
            weights, f"{prefix}up_proj", intermediate_size, hidden_size, bias=bias, part=of_outputs(part)
        )
        self.down_proj = Linear.take(
            weights,
            f"{prefix}down_proj",
            hidden_size,
            intermediate_size,
            bias=bias and tp.rank == 0,
            part=of_inputs(part),
        )

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """See :class:`engine.models.block.Mixer`."""
        return self(x)

    def __call__(self, x: Tensor) -> Tensor:
        """``[n, hidden]`` to ``[n, hidden]``; of several ranks a summand on each."""
        return self.down_proj(self.up_proj.relu_squared(x))
