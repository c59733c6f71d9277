"""A mixture of experts. Each expert is a small MLP.

    top-k, w = route(router(x))                              kernels/moe/moe_route.py
    y        = fc2(sum_e w_e expert_e(fc1(x))) + sigmoid(gate(x)) shared(x)

The latent projections fc1 and fc2 change the hidden state to the size that the routed experts use, and back.
Not every checkpoint has latent projections, a shared expert or its gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.mixer_config import Activation, MlpConfig, MoeConfig
from engine.checkpoint.weight_dtype import WeightDtype, narrowed
from engine.checkpoint.weights import Weights
from engine.memory.caches import LayerCaches
from engine.models.batch import Batch
from engine.models.layers.expert_weights import NEMOTRON_EXPERTS, ExpertNames, load_experts
from engine.models.layers.linear import Linear, StoredWeights, silu_gated
from engine.models.layers.mlp import Mlp
from engine.models.layers.shared_expert import SharedExperts, as_experts
from engine.parallel.tensor_parallel import TensorParallel
from kernels.linear.quantized_weight import QuantizedWeight
from kernels.moe.expert_linear import expert_linear
from kernels.moe.few_token_experts import TILE_ROWS, are_few_tokens, few_token_down, few_token_up
from kernels.moe.moe_combine import moe_combine
from kernels.moe.moe_route import Routing, moe_route
from kernels.moe.moe_sort import moe_sort
from kernels.moe.packed_experts import GroupedRows, PackedExperts
from kernels.moe.quantized_experts import QuantizedExperts, quantized_experts
from kernels.moe.router_logits import MOST_TOKENS as MOST_ROUTED
from kernels.moe.router_logits import router_logits
from kernels.norms.add import add
from kernels.norms.relu_squared import relu_squared
from kernels.norms.sigmoid_gate import add_sigmoid_gated


@dataclass(frozen=True)
class MoeNames:
    """A family's names of the parts of a layer, without the layer's prefix."""

    router: str = "gate"
    shared: str = "shared_experts."
    shared_gate: str = "shared_expert_gate"
    experts: ExpertNames = NEMOTRON_EXPERTS


class Moe:
    """Router, routed experts and shared expert. A token's output depends on no other token.

    A rank has a share of every expert's intermediate channels. With expert parallelism it has some of the
    routed experts instead, each of them whole.
    """

    def __init__(
        self,
        config: MoeConfig,
        hidden_size: int,
        weights: Weights,
        prefix: str,
        tp: TensorParallel,
        names: MoeNames,
    ) -> None:
        self.routing = Routing(
            config.experts_per_token,
            config.expert_groups,
            config.groups_per_token,
            config.normalize_weights,
            config.scaling_factor,
            config.scoring,
        )
        router = f"{prefix}{names.router}"
        router_shape = (config.num_experts, hidden_size)
        self.router = Linear(
            weights.take(f"{router}.weight", router_shape, dtype=torch.float32),
            batch_invariant=weights.batch_invariant,
        )
        self.correction = None
        if config.scoring == "sigmoid":
            self.correction = weights.take(
                f"{router}.e_score_correction_bias", (config.num_experts,), dtype=torch.float32
            )
        self.shared = self.shared_gate = None
        if config.shared_intermediate_size > 0:
            sizes = MlpConfig(config.shared_intermediate_size, config.bias, config.activation)
            self.shared = Mlp(sizes, hidden_size, weights, f"{prefix}{names.shared}", tp)
        if config.shared_gate:
            self.shared_gate = Linear.take(weights, f"{prefix}{names.shared_gate}", 1, hidden_size)
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
                bias=config.bias and tp.rank == 0,  # all ranks apply fc2 to their summands, one adds the bias
            )
        self.is_batch_invariant = weights.batch_invariant
        self.sharing = tp.experts
        self.num_experts = config.num_experts
        up, down = load_experts(config, size, weights, prefix, tp, names.experts)
        kind = _kind_of_experts(weights.device, (*up, *down))
        if kind is StackedExperts and (shared := self._shared_experts(up, down)) is not None:
            up, down = (*up, *shared.up), (*down, *shared.down)
            self.routing = replace(self.routing, shared_experts=len(shared.up))
            self.shared = None
        if kind is GroupedExperts:
            up, down = (_narrowed(stack, weights.weight_dtype) for stack in (up, down))
        self.experts = kind(up, down, config.activation, batch_invariant=weights.batch_invariant)

    def _shared_experts(self, up: StoredWeights, down: StoredWeights) -> SharedExperts | None:
        is_plain_sum = self.shared_gate is None and self.leave_latent is None and self.sharing.size == 1
        return as_experts(self.shared, up, down) if self.shared is not None and is_plain_sum else None

    @property
    def is_recorded(self) -> bool:
        """Whether all that it does on a CPU are calls of kernels (:mod:`kernels.cpu.graph`)."""
        return isinstance(self.experts, GroupedExperts) and self.sharing.size == 1

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """See :class:`engine.models.block.Mixer`."""
        return self._summed(x)

    def _summed(self, x: Tensor) -> Tensor:
        expert_ids, expert_weights = self.route(x)
        entered = x if self.enter_latent is None else self.enter_latent(x)
        if self.sharing.size == 1:
            routed = self.experts.forward(entered, expert_ids, expert_weights)
        else:
            routed = self.sharing.run(entered, expert_ids, expert_weights, self.experts, self.num_experts)
        if self.leave_latent is not None:
            routed = self.leave_latent(routed)
        if self.shared is None:
            return routed
        if self.shared_gate is None:
            return add(self.shared(x), routed)
        return add_sigmoid_gated(routed, self.shared(x), self.shared_gate(x))

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the products of few tokens: there is a program for each of several numbers of tokens."""
        weight = self.router.weight
        if self.sharing.size > 1 or weight is None:
            return
        for num_tokens in TILE_ROWS:
            x = weight.new_zeros(num_tokens, self.router.in_features, dtype=dtype)
            self._summed(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids ``[n, k]`` int64 and their weights ``[n, k]`` float32."""
        return moe_route(self._logits(x), self.correction, self.routing)

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.router.weight
        if weight is not None and weight.is_cuda and len(x) <= MOST_ROUTED and not self.is_batch_invariant:
            return router_logits(x, weight)
        return self.router(x.to(torch.float32))


class GroupedExperts:
    """Experts for CPU, computed in float32: one call multiplies the rows of all experts that have tokens."""

    def __init__(
        self, up: StoredWeights, down: StoredWeights, activation: Activation, *, batch_invariant: bool = False
    ) -> None:
        self.is_gated = activation == "silu_gated"
        self.up, self.down = (
            PackedExperts([weight for weight in stack if isinstance(weight, Tensor)]) for stack in (up, down)
        )

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """See :meth:`LoopedExperts.forward`."""
        grouped = GroupedRows.sort(x, expert_ids, len(self.up))
        return moe_combine(self._rows(grouped), grouped.places, expert_weights)

    def pairs(self, x: Tensor, expert_ids: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        """See :class:`engine.parallel.expert_parallel.Experts`."""
        is_own = slots < num_slots
        grouped = GroupedRows.sort(x, torch.where(is_own, expert_ids, len(self.up)), len(self.up))
        outputs = x.new_empty(len(x), num_slots, x.shape[1])
        tokens, columns = is_own.nonzero(as_tuple=True)
        places = grouped.places[tokens, columns]
        outputs[tokens, slots[tokens, columns]] = self._rows(grouped)[places]
        return outputs

    def combine(self, results: Tensor, places: Tensor, expert_weights: Tensor) -> Tensor:
        """See :func:`moe_combine`."""
        return moe_combine(results, places, expert_weights)

    def _rows(self, grouped: GroupedRows) -> Tensor:
        hidden = self.up(grouped.rows, grouped.segments, relu_squared=not self.is_gated)
        return self.down(silu_gated(hidden) if self.is_gated else hidden, grouped.segments)


class LoopedExperts:
    """Experts for CPU in bfloat16 or quantised: a loop over the experts that have tokens."""

    def __init__(
        self, up: StoredWeights, down: StoredWeights, activation: Activation, *, batch_invariant: bool = False
    ) -> None:
        self.activation = activation
        self.up = [Linear(weight, batch_invariant=batch_invariant) for weight in up]
        self.down = [Linear(weight, batch_invariant=batch_invariant) for weight in down]

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute ``sum_j weight_j expert_j(x)`` for x ``[n, size]``, ids and weights ``[n, k]``."""
        num_tokens, k = expert_ids.shape
        if num_tokens == 1:  # batch 1: nothing to sort or gather
            outputs = torch.cat([self._expert(expert, x) for expert in expert_ids[0].tolist()])
        else:
            outputs = self._rows(x, torch.arange(num_tokens * k) // k, expert_ids.flatten())
        return _weighted_sum(outputs.view(num_tokens, k, -1), expert_weights)

    def pairs(self, x: Tensor, expert_ids: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        """See :class:`engine.parallel.expert_parallel.Experts`."""
        outputs = x.new_empty(len(x), num_slots, x.shape[1])
        tokens, columns = (slots < num_slots).nonzero(as_tuple=True)
        if len(tokens) > 0:
            results = self._rows(x, tokens, expert_ids[tokens, columns])
            outputs[tokens, slots[tokens, columns]] = results
        return outputs

    def combine(self, results: Tensor, places: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute :func:`moe_combine`, bit for bit as :meth:`forward` does."""
        return _weighted_sum(results[places], expert_weights)

    def _rows(self, x: Tensor, tokens: Tensor, expert_ids: Tensor) -> Tensor:
        """Return in row i the output of expert ``expert_ids[i]`` for ``x[tokens[i]]``."""
        order = expert_ids.argsort()
        counts = expert_ids.bincount(minlength=len(self.up)).tolist()
        by_expert = torch.split(x[tokens[order]], counts)
        results = [self._expert(expert, rows) for expert, rows in enumerate(by_expert) if counts[expert]]
        outputs = x.new_empty(len(expert_ids), x.shape[1])
        outputs[order] = torch.cat(results)
        return outputs

    def _expert(self, index: int, x: Tensor) -> Tensor:
        return self.down[index](self.up[index].activated(x, self.activation))


class StackedExperts:
    """All experts in two tensors, so that one call (a grouped GEMM) computes the products of all experts.

    No shape depends on the data and the host never waits, so a step can be captured as a graph.
    """

    def __init__(
        self, up: StoredWeights, down: StoredWeights, activation: Activation, *, batch_invariant: bool = False
    ) -> None:
        self.is_gated = activation == "silu_gated"
        self.activate = silu_gated if self.is_gated else relu_squared
        self.batch_invariant = batch_invariant
        self.up, self.down = _stacked(up), _stacked(down)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """See :meth:`LoopedExperts.forward`."""
        if isinstance(self.up, Tensor) and isinstance(self.down, Tensor) and self._are_few(x):
            hidden = few_token_up(x, self.up, expert_ids, is_gated=self.is_gated)
            results = few_token_down(hidden, self.down, expert_ids)
            return moe_combine(results.flatten(0, 1), None, expert_weights)
        tokens, places, ends = moe_sort(expert_ids, len(self.up))
        return moe_combine(self._rows(x[tokens], ends), places, expert_weights)

    def pairs(self, x: Tensor, expert_ids: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        """See :class:`engine.parallel.expert_parallel.Experts`."""
        num_experts = len(self.up)
        # Pairs of other ranks' experts are sorted to the end. No product is computed for them.
        expert_ids = torch.where(slots < num_slots, expert_ids, num_experts)
        tokens, places, ends = moe_sort(expert_ids, num_experts + 1)
        results = self._rows(x[tokens], ends[:num_experts])
        found = places.new_zeros(len(x), num_slots + 1).scatter_(1, slots, places)
        return results[found[:, :num_slots]]

    def combine(self, results: Tensor, places: Tensor, expert_weights: Tensor) -> Tensor:
        """See :func:`moe_combine`."""
        return moe_combine(results, places, expert_weights)

    def _are_few(self, x: Tensor) -> bool:
        return x.is_cuda and not self.batch_invariant and are_few_tokens(x)

    def _rows(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Apply expert e to rows ``ends[e - 1]`` … ``ends[e] - 1``. Rows after the last end are undefined."""
        return self._product(self.activate(self._product(rows, self.up, ends)), self.down, ends)

    def _product(self, rows: Tensor, weights: Tensor | QuantizedExperts, ends: Tensor) -> Tensor:
        """Multiply rows ``ends[e - 1]`` … ``ends[e] - 1`` by the weight of expert e."""
        if isinstance(weights, QuantizedExperts):
            return quantized_experts(rows, weights, ends, batch_invariant=self.batch_invariant)
        if weights.is_cuda and (self.batch_invariant or not _has_grouped_mm(weights)):
            return expert_linear(rows, weights, ends)
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _kind_of_experts(
    device: torch.device, weights: StoredWeights
) -> type[GroupedExperts | LoopedExperts | StackedExperts]:
    if device.type != "cpu":
        return StackedExperts
    are_float32 = all(isinstance(weight, Tensor) and weight.dtype == torch.float32 for weight in weights)
    return GroupedExperts if are_float32 else LoopedExperts


def _narrowed(weights: StoredWeights, weight_dtype: WeightDtype) -> list[Tensor]:
    """Return the experts' weights in the dtype in which all of them are kept."""
    kept = [narrowed(weight, weight_dtype) for weight in weights if isinstance(weight, Tensor)]
    is_narrow = all(weight.dtype == torch.bfloat16 for weight in kept)
    return kept if is_narrow else [weight.to(torch.float32) for weight in kept]


def _stacked(weights: StoredWeights) -> Tensor | QuantizedExperts:
    """Stack weights to ``[experts, out, in]``."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if quantized:
        return QuantizedExperts.stack(quantized)
    return torch.stack([weight for weight in weights if isinstance(weight, Tensor)])


def _has_grouped_mm(weights: Tensor) -> bool:
    """Return whether torch multiplies with these weights without reading the ends of runs on the host."""
    return weights.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weights.device)[0] in (9, 10)


def _weighted_sum(outputs: Tensor, expert_weights: Tensor) -> Tensor:
    """Sum ``[n, k, size]`` with weights ``[n, k]`` to ``[n, size]``, in float32 and in order."""
    summed = expert_weights[:, 0, None] * outputs[:, 0].to(torch.float32)
    for j in range(1, outputs.shape[1]):
        summed += expert_weights[:, j, None] * outputs[:, j].to(torch.float32)
    return summed.to(outputs.dtype)
