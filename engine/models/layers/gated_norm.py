"""The gate and the norm at the end of a Mamba-2 mixer. Several ranks may share a group of the norm.

| order | |
|---|---|
| `gate_first` | ``norm(y * silu(z))``; Mamba-2 (arXiv:2405.21060, section 7) |
| `norm_first` | ``norm(y) * silu(z)`` |
| `gate_alone` | ``y * silu(z)`` |

norm(u) = u / sqrt(mean of u^2 over the channel's group + eps) * weight
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.mixer_config import MambaConfig
from engine.checkpoint.model_shard import MambaShard
from engine.checkpoint.weights import Weights, of_outputs
from engine.parallel.tensor_parallel import TensorParallel
from kernels.norms.gated_rms_norm import gated_group_rms_norm, group_rms_norm_then_gate
from kernels.norms.silu_gate import silu_gate
from wire.errors import ConfigError


class GatedNorm:
    """One layer's gate and norm, and the norm's weight if there is one.

    A call maps y and z, both ``[n, d]``, to ``[n, d]``. ``d`` is the number of this rank's channels.
    """

    def __init__(
        self, config: MambaConfig, eps: float, weights: Weights, prefix: str, tp: TensorParallel
    ) -> None:
        shard = MambaShard.of(config, tp)
        self.tp = tp
        self.eps = eps
        self.order = config.gate_order
        self.num_groups = config.norm_groups
        self.group_size = config.d_inner // config.norm_groups
        self.group = shard.inner_rows[0][0] // self.group_size
        self.weight = None
        if weights.batch_invariant and self.order != "gate_alone" and self.num_groups % tp.size:
            raise ConfigError(
                f"`batch_invariant`: `tensor_parallel` {tp.size} spreads the {self.num_groups} groups of a "
                "norm over ranks, whose sums depend on the batch; choose a number that divides them"
            )
        if self.order != "gate_alone":
            part = of_outputs(*shard.inner_rows)
            self.weight = weights.take(f"{prefix}.weight", (config.d_inner,), part=part)

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        if self.weight is None:
            return silu_gate(y, z)
        if self.num_groups % self.tp.size:
            return self._across_ranks(y, z, self.weight)
        norm = gated_group_rms_norm if self.order == "gate_first" else group_rms_norm_then_gate
        return norm(y, z, self.weight, group_size=self.group_size, eps=self.eps)

    def _across_ranks(self, y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """Normalize groups that are spread over ranks.

        First the ranks add up their sums of squares; each group has a column of its own.
        """
        gate, u = F.silu(z.float()), y.float()
        if self.order == "gate_first":
            u = u * gate
        squares = torch.zeros(len(y), self.num_groups, device=y.device)
        squares[:, self.group] = u.square().sum(dim=-1)
        mean = self.tp.sum(squares)[:, self.group, None] / self.group_size
        u = u * torch.rsqrt(mean + self.eps) * weight.float()
        return (u if self.order == "gate_first" else u * gate).to(y.dtype)
