"""Mixture of relu^2 experts with a sigmoid router (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    top-k, w = route(gate(x))                                kernels/moe_route.py
    y        = fc2(sum_e w_e expert_e(fc1(x))) + shared(x)

fc1 and fc2 are latent projections; not every checkpoint has them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.caches import LayerCaches
from engine.mixer_config import MoeConfig
from engine.models.linear import Linear
from engine.models.mlp import Mlp
from engine.tensor_parallel import TensorParallel
from engine.weights import Part, Weights, of_inputs, of_outputs
from kernels.moe_combine import moe_combine
from kernels.moe_route import Routing, moe_route
from kernels.moe_sort import moe_sort
from kernels.relu_squared import relu_squared


class Moe:
    """Router, routed experts, shared expert. A token's output depends on that token alone.

    A rank has a share of every expert's intermediate channels.
    """

    def __init__(
        self, config: MoeConfig, hidden_size: int, weights: Weights, prefix: str, tp: TensorParallel
    ) -> None:
        self.routing = Routing(
            config.experts_per_token,
            config.expert_groups,
            config.groups_per_token,
            config.normalize_weights,
            config.scaling_factor,
        )
        gate_shape = (config.num_experts, hidden_size)
        self.gate = weights.take(f"{prefix}gate.weight", gate_shape, dtype=torch.float32)
        self.correction = weights.take(
            f"{prefix}gate.e_score_correction_bias", (config.num_experts,), dtype=torch.float32
        )
        self.shared = Mlp(
            hidden_size, config.shared_intermediate_size, config.bias, weights, f"{prefix}shared_experts.", tp
        )
        size = config.latent_size or hidden_size
        self.enter_latent = self.leave_latent = None
        if config.latent_size is not None:
            self.enter_latent = Linear.take(
                weights, f"{prefix}fc1_latent_proj", size, hidden_size, bias=config.bias
            )
            self.leave_latent = Linear.take(
                weights,
                f"{prefix}fc2_latent_proj",
                hidden_size,
                size,
                bias=config.bias and tp.rank == 0,  # it is applied to each rank's summand
            )
        experts = LoopedExperts if weights.device.type == "cpu" else StackedExperts
        self.experts = experts(*load_experts(config, size, weights, f"{prefix}experts.", tp))

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """See :class:`engine.models.block.Mixer`."""
        expert_ids, expert_weights = self.route(x)
        entered = x if self.enter_latent is None else self.enter_latent(x)
        routed = self.experts.forward(entered, expert_ids, expert_weights)
        if self.leave_latent is not None:
            routed = self.leave_latent(routed)
        return self.shared(x).add_(routed)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids ``[n, k]`` int64 and their weights ``[n, k]`` float32."""
        return moe_route(F.linear(x.to(torch.float32), self.gate), self.correction, self.routing)


def load_experts(
    config: MoeConfig, size: int, weights: Weights, prefix: str, tp: TensorParallel
) -> tuple[list[Tensor], list[Tensor]]:
    """The rank's share of each expert's up ``[intermediate, size]`` and down ``[size, intermediate]``."""
    up_shape, down_shape = (config.intermediate_size, size), (size, config.intermediate_size)
    share = tp.share(config.intermediate_size)
    part = ((share.start, share.stop),)
    if f"{prefix}up_proj" in weights:  # as transformers 5 may save it
        up = weights.take(f"{prefix}up_proj", (config.num_experts, *up_shape), part=Part(1, part))
        down = weights.take(f"{prefix}down_proj", (config.num_experts, *down_shape), part=Part(2, part))
        return list(up.unbind()), list(down.unbind())
    experts = [f"{prefix}{expert}." for expert in range(config.num_experts)]
    return (
        [weights.take(f"{one}up_proj.weight", up_shape, part=of_outputs(*part)) for one in experts],
        [weights.take(f"{one}down_proj.weight", down_shape, part=of_inputs(*part)) for one in experts],
    )


class LoopedExperts:
    """A loop over the experts that have tokens. For CPU."""

    def __init__(self, up: list[Tensor], down: list[Tensor]) -> None:
        self.up = [Linear(weight) for weight in up]
        self.down = [Linear(weight) for weight in down]

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """``sum_k weight_k expert_k(x)`` for ``x[n, size]``, ids and weights ``[n, k]``."""
        num_tokens, k = expert_ids.shape
        outputs = x.new_empty(num_tokens * k, x.shape[1])
        if num_tokens == 1:  # batch 1: nothing to sort or gather
            for place, expert in enumerate(expert_ids[0].tolist()):
                outputs[place] = self._expert(expert, x)
        else:
            flat_ids = expert_ids.flatten()
            order = flat_ids.argsort()
            counts = flat_ids.bincount(minlength=len(self.up)).tolist()
            by_expert = torch.split(x[order // k], counts)
            results = [self._expert(expert, rows) for expert, rows in enumerate(by_expert) if counts[expert]]
            outputs[order] = torch.cat(results)
        return _weighted_sum(outputs.view(num_tokens, k, -1), expert_weights)

    def _expert(self, index: int, x: Tensor) -> Tensor:
        return self.down[index](self.up[index].relu_squared(x))


class StackedExperts:
    """All experts in two tensors for grouped GEMMs. Shapes depend on none of the data and the host waits
    for nothing, so that a step can be captured as a graph.
    """

    def __init__(self, up: list[Tensor], down: list[Tensor]) -> None:
        self.up, self.down = torch.stack(up), torch.stack(down)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """As :meth:`LoopedExperts.forward`."""
        tokens, places, ends = moe_sort(expert_ids, self.up.shape[0])
        hidden = relu_squared(F.grouped_mm(x[tokens], self.up.transpose(1, 2), offs=ends))
        results = F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        return moe_combine(results, places, expert_weights)


def _weighted_sum(outputs: Tensor, expert_weights: Tensor) -> Tensor:
    """``[n, k, size]`` with weights ``[n, k]`` to ``[n, size]``, summed in float32."""
    summed = torch.bmm(expert_weights.unsqueeze(1), outputs.to(torch.float32))
    return summed.squeeze(1).to(outputs.dtype)
