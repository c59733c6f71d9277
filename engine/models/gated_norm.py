"""The norm at the end of a Mamba-2 mixer, also where its groups are spread over ranks.

u   = y * silu(z)
out = u / sqrt(mean over its group of u^2 + eps) * weight
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.mixer_config import MambaConfig
from engine.model_shard import MambaShard
from engine.tensor_parallel import TensorParallel
from engine.weights import Weights, of_outputs
from kernels.gated_rms_norm import gated_group_rms_norm


class GatedNorm:
    """One layer's weight; ``[n, d]`` twice to ``[n, d]`` with the rank's ``d`` channels."""

    def __init__(
        self, config: MambaConfig, eps: float, weights: Weights, prefix: str, tp: TensorParallel
    ) -> None:
        shard = MambaShard.of(config, tp)
        self.tp = tp
        self.eps = eps
        self.num_groups = config.norm_groups
        self.group_size = config.d_inner // config.norm_groups
        self.group = shard.inner_rows[0][0] // self.group_size
        self.weight = weights.take(f"{prefix}.weight", (config.d_inner,), part=of_outputs(*shard.inner_rows))

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        if self.num_groups >= self.tp.size:
            return gated_group_rms_norm(y, z, self.weight, group_size=self.group_size, eps=self.eps)
        return self._across_ranks(y, z)

    def _across_ranks(self, y: Tensor, z: Tensor) -> Tensor:
        """Ranks have parts of one group: the sums of squares go around first, each in its group's column."""
        gated = y.float() * F.silu(z.float())
        squares = torch.zeros(len(y), self.num_groups, device=y.device)
        squares[:, self.group] = gated.square().sum(dim=-1)
        mean = self.tp.sum(squares)[:, self.group, None] / self.group_size
        return (gated * torch.rsqrt(mean + self.eps) * self.weight.float()).to(y.dtype)
