"""MLPs and mixtures of experts as each family stores them, against transformers' layers."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import FalconH1Config, GraniteMoeHybridConfig, LlamaConfig, Qwen3NextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMLP,
    GraniteMoeHybridMoE,
)
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from engine.checkpoint.mixer_config import MlpConfig, MoeConfig
from engine.checkpoint.weights import WeightFiles
from engine.models.families.granite_moe_hybrid import MLP_NAMES, MOE_NAMES
from engine.models.layers.expert_weights import GATED_EXPERTS, load_experts
from engine.models.layers.mlp import Mlp
from engine.models.layers.moe import GroupedExperts, LoopedExperts, Moe, MoeNames, StackedExperts
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from kernels.cpu.graph import CpuGraph

HIDDEN = 48
GRANITE = GraniteMoeHybridConfig(
    hidden_size=HIDDEN,
    intermediate_size=24,
    shared_intermediate_size=80,
    num_local_experts=6,
    num_experts_per_tok=2,
    mamba_n_heads=8,
)


def randomized(layer):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return layer.eval()


def inputs(num_tokens):
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(num_tokens))


def stored(directory, tensors):
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return WeightFiles(directory)


MLPS = {
    "llama, biased": (
        MlpConfig(96, True, "silu_gated"),
        None,
        lambda: LlamaMLP(
            LlamaConfig(hidden_size=HIDDEN, intermediate_size=96, num_attention_heads=4, mlp_bias=True)
        ),
    ),
    "falcon-h1, scaled": (
        MlpConfig(96, False, "silu_gated", gate_scale=0.7, out_scale=1.4),
        None,
        lambda: FalconH1MLP(
            FalconH1Config(hidden_size=HIDDEN, intermediate_size=96, mlp_multipliers=[0.7, 1.4])
        ),
    ),
    "granite, stored joined": (
        MlpConfig(80, False, "silu_gated"),
        MLP_NAMES,
        lambda: GraniteMoeHybridMLP(GRANITE),
    ),
}


@pytest.mark.parametrize(("config", "names", "make"), MLPS.values(), ids=MLPS)
@torch.inference_mode()
def test_gated_mlps_are_those_of_transformers_on_one_rank_and_on_two(tmp_path, config, names, make):
    theirs = randomized(make())
    weights = stored(tmp_path, theirs.state_dict())
    mlp = Mlp(config, HIDDEN, weights, "", ALONE, names)
    ranks = [Mlp(config, HIDDEN, weights, "", TensorParallel(rank, 2), names) for rank in range(2)]
    for num_tokens in (1, 7):
        x = inputs(num_tokens)
        torch.testing.assert_close(mlp(x), theirs(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ranks[0](x) + ranks[1](x), theirs(x), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_gated_mlp_can_be_recorded(tmp_path):
    theirs = randomized(GraniteMoeHybridMLP(GRANITE))
    mlp = Mlp(
        MlpConfig(80, False, "silu_gated"),
        HIDDEN,
        stored(tmp_path, theirs.state_dict()),
        "",
        ALONE,
        MLP_NAMES,
    )
    x, graph = torch.zeros(5, HIDDEN), CpuGraph()
    with graph.record():
        y = mlp(x)
    x.copy_(inputs(5))
    graph.replay()
    torch.testing.assert_close(y, theirs(x), rtol=1e-4, atol=1e-5)


def qwen_tensors(theirs, *, is_stacked):
    """As published: expert by expert (Qwen3-Next), or stacked as transformers has them (Qwen3.5)."""
    tensors = theirs.state_dict()
    if is_stacked:
        return tensors
    gate_up, down = tensors.pop("experts.gate_up_proj"), tensors.pop("experts.down_proj")
    for expert in range(len(down)):
        gate, up = gate_up[expert].chunk(2)
        one = f"experts.{expert}."
        tensors |= {f"{one}gate_proj.weight": gate, f"{one}up_proj.weight": up}
        tensors[f"{one}down_proj.weight"] = down[expert]
    return tensors


def qwen(*, is_stacked, normalize):
    theirs = Qwen3NextSparseMoeBlock(
        Qwen3NextConfig(
            hidden_size=HIDDEN,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            norm_topk_prob=normalize,
        )
    )
    return SimpleNamespace(
        config=MoeConfig(
            8, 3, 1, 1, normalize, 1.0, 24, 40, None, False, "silu_gated", scoring="softmax", shared_gate=True
        ),
        names=MoeNames(shared="shared_expert.", experts=GATED_EXPERTS),
        theirs=randomized(theirs),
        tensors=lambda theirs: qwen_tensors(theirs, is_stacked=is_stacked),
    )


def granite():
    published = {
        "router.weight": "router.layer.weight",
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
    }
    return SimpleNamespace(
        config=MoeConfig(6, 2, 1, 1, True, 1.0, 24, 0, None, False, "silu_gated", scoring="softmax"),
        names=MOE_NAMES,
        theirs=randomized(GraniteMoeHybridMoE(GRANITE)),
        tensors=lambda theirs: {published[name]: tensor for name, tensor in theirs.state_dict().items()},
    )


MIXTURES = {
    "qwen, expert by expert": lambda: qwen(is_stacked=False, normalize=True),
    "qwen, stacked, not normalized": lambda: qwen(is_stacked=True, normalize=False),
    "granite": granite,
}


@pytest.fixture(params=MIXTURES.values(), ids=MIXTURES)
def mixture(request, tmp_path):
    case = request.param()
    case.weights = stored(tmp_path, case.tensors(case.theirs))
    return case


@torch.inference_mode()
def test_mixtures_are_those_of_transformers_on_one_rank_and_on_two(mixture):
    def load(tp):
        return Moe(mixture.config, HIDDEN, mixture.weights, "", tp, mixture.names)

    moe, ranks = load(ALONE), [load(TensorParallel(rank, 2)) for rank in range(2)]
    assert mixture.weights.unused() == []
    for num_tokens in (1, 40):
        x = inputs(num_tokens)
        expected = mixture.theirs(x[None])[0]
        torch.testing.assert_close(moe.forward(x, None, None), expected, rtol=1e-4, atol=1e-5)
        total = sum(rank.forward(x, None, None) for rank in ranks)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_grouped_products_and_the_loop_over_gated_experts_agree(mixture):
    experts = load_experts(mixture.config, HIDDEN, mixture.weights, "", ALONE, mixture.names.experts)
    kinds = LoopedExperts, StackedExperts, GroupedExperts
    looped, *others = (kind(*experts, "silu_gated") for kind in kinds)
    moe = Moe(mixture.config, HIDDEN, mixture.weights, "", ALONE, mixture.names)
    for num_tokens in (1, 2, 50):
        x = inputs(num_tokens)
        routed = x, *moe.route(x)
        expected = looped.forward(*routed)
        for grouped in others:
            torch.testing.assert_close(grouped.forward(*routed), expected)


@torch.inference_mode()
def test_experts_of_two_ranks_combine_to_the_bits_of_one(mixture):
    """Each rank computes the pairs of its own half of the experts and returns them in slots of its own."""
    up, down = load_experts(mixture.config, HIDDEN, mixture.weights, "", ALONE, mixture.names.experts)
    x, half = inputs(9), len(up) // 2
    ids, expert_weights = Moe(mixture.config, HIDDEN, mixture.weights, "", ALONE, mixture.names).route(x)
    k = ids.shape[1]
    results, places = [], torch.empty_like(ids)
    for rank, own in enumerate((slice(0, half), slice(half, None))):
        experts = GroupedExperts(up[own], down[own], "silu_gated")
        is_own = (ids >= half) == bool(rank)
        slots = torch.where(is_own, is_own.cumsum(1) - 1, k)
        results.append(experts.pairs(x, ids - rank * half, slots, k).view(len(x) * k, -1))
        first = rank * len(x) * k + torch.arange(len(x))[:, None] * k
        places = torch.where(is_own, first + slots, places)
    whole = GroupedExperts(up, down, "silu_gated")
    combined = whole.combine(torch.cat(results), places, expert_weights)
    assert torch.equal(combined, whole.forward(x, ids, expert_weights))
