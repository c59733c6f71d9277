"""Rates of servers by formula, and step costs by ``config.json``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint.model_config import ModelConfig, MoeConfig
from engine.cost.goodput import (
    DecodeRate,
    Lengths,
    Objective,
    ServerLimits,
    ServerRates,
    decode_rate,
    prefill_rate,
)
from engine.cost.gpu import GpuSpeed, gpu_costs
from engine.cost.step_cost import DecodeCost, HandoffCost, PrefillCost, StepCosts, WeightCost, pairs_of
from engine.cost.weight_size import weight_bytes
from engine.models import read_config
from engine.parallel.tensor_parallel import TensorParallel
from twinfang.flags.table import BUNDLED_MODEL

HANDOFF = HandoffCost(0.0, 0, 0, 1.0)
LIMITS = ServerLimits(chunk_tokens=100, max_rows=64, num_blocks=10_000, block_size=16)
GPU = GpuSpeed(flops_per_s=1e12, bytes_per_s=1e11, link_bytes_per_s=1e10)


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return read_config(Path(BUNDLED_MODEL), weight_dtype="float32")  # as a GPU keeps them


def test_lengths_have_their_mean_and_their_maximum():
    lengths = Lengths(1000, 0.8)
    assert sum(lengths.sample) / len(lengths.sample) == pytest.approx(1000, rel=0.03)
    assert max(Lengths(1000, 0.8, 1500).sample) == 1500
    assert set(Lengths(1000).sample) == {1000}


def test_chunks_of_a_prompt_compute_all_its_pairs():
    cost = PrefillCost(step_s=0.5, token_s=0.0, pair_s=1.0)
    assert cost.prompt_s(250, 100) == 3 * 0.5 + pairs_of(0, 250)


def test_a_prompt_takes_no_more_of_full_steps_than_alone():
    cost = PrefillCost(0.01, 1e-5, 1e-9, WeightCost(0.005))
    for num_tokens in (10, 100, 130, 1000):
        assert cost.share_s(num_tokens, 100) <= cost.prompt_s(num_tokens, 100) + 1e-12
    assert cost.share_s(1000, 100) == pytest.approx(cost.prompt_s(1000, 100))


def test_a_prefill_server_takes_what_the_tail_of_m_d_1_allows():
    costs = StepCosts(PrefillCost(0.01, 0.0, 0.0), DecodeCost(0.0, 0.0, 0.0), HANDOFF)
    rate = prefill_rate(costs, Lengths(100), Objective(0.06, 1.0), LIMITS)
    rho = rate * 0.01
    wait_s = rho * 0.01 / (2 * (1 - rho))
    assert rho * math.exp(-rho * 0.05 / wait_s) == pytest.approx(0.1, rel=1e-3)
    assert prefill_rate(costs, Lengths(100), Objective(10.0, 1.0), LIMITS) == pytest.approx(100, rel=0.01)
    assert prefill_rate(costs, Lengths(100), Objective(0.009, 1.0), LIMITS) == 0.0


@pytest.mark.parametrize(
    ("tpot_s", "limits", "bound", "peak"),
    [
        (0.030, LIMITS, "TPOT", 20),
        (1.0, LIMITS, "rows", 64),
        (1.0, replace(LIMITS, num_blocks=100), "blocks", 10),
    ],
)
def test_a_decode_server_is_bound_by_what_is_least(
    tpot_s: float, limits: ServerLimits, bound: str, peak: int
):
    costs = StepCosts(PrefillCost(0.0, 0.0, 0.0), DecodeCost(0.01, 0.001, 0.0), HANDOFF)
    found = decode_rate(costs, Lengths(110), Lengths(50), Objective(1.0, tpot_s), limits)  # 10 blocks each
    assert found.bound == bound
    assert found.rows + 1.2816 * math.sqrt(found.rows) == pytest.approx(peak, rel=1e-3)
    assert found.requests_per_s == pytest.approx(found.rows / (50 * found.step_s))


def test_a_row_that_is_too_slow_alone_has_no_rate():
    costs = StepCosts(PrefillCost(0.0, 0.0, 0.0), DecodeCost(0.1, 0.0, 0.0), HANDOFF)
    found = decode_rate(costs, Lengths(110), Lengths(50), Objective(1.0, 0.05), LIMITS)
    assert (found.requests_per_s, found.bound) == (0.0, "TPOT")


@pytest.mark.parametrize(("prefill", "num_prefill"), [(10.0, 4), (30.0, 2), (1.0, 7), (1000.0, 1)])
def test_servers_are_divided_by_their_rates(prefill: float, num_prefill: int):
    split = ServerRates(prefill, DecodeRate(10.0, 8.0, 0.01, "rows")).best_split(8)
    assert (split.num_prefill, split.num_decode) == (num_prefill, 8 - num_prefill)
    assert split.requests_per_s == min(num_prefill * prefill, (8 - num_prefill) * 10.0)


def test_a_decode_step_reads_weights_once_states_twice_and_kv_once(model: ModelConfig):
    costs, spec = gpu_costs(model, GPU), model.cache_spec()
    table = model.vocab_size * model.hidden_size * model.dtype.itemsize  # looked up, not read
    assert costs.decode.weights.always_s == pytest.approx((weight_bytes(model) - table) / 1e11)
    assert costs.decode.row_s == 2 * spec.slot_bytes / 1e11
    assert costs.decode.context_s == spec.block_bytes(1) / 1e11
    assert costs.handoff.num_bytes(100) == spec.slot_bytes + 100 * spec.block_bytes(1)


def test_a_token_computes_twice_the_weights_and_a_pair_all_heads(model: ModelConfig):
    costs = gpu_costs(model, GPU)
    head = model.vocab_size * model.hidden_size
    body = weight_bytes(model) // model.dtype.itemsize - 2 * head
    assert costs.decode.token_s == pytest.approx(2 * (body + head) / 1e12)
    assert 2 * body / 1e12 < costs.prefill.token_s < 4 * body / 1e12  # the scan is much of so small a model
    assert costs.prefill.pair_s == pytest.approx(2 * 4 * 4 * 32 / 1e12)


def test_only_the_experts_that_a_step_uses_are_read(model: ModelConfig):
    moe = MoeConfig(16, 4, 1, 1, True, 1.0, 256, 512, None, False, "relu_squared")
    kinds = tuple("moe" if kind == "mlp" else kind for kind in model.layer_types)
    config = replace(model, moe=moe, layer_types=kinds)  # type: ignore[arg-type]
    weights = gpu_costs(config, GPU).decode.weights
    experts = 3 * 16 * 2 * 256 * model.hidden_size * model.dtype.itemsize
    # An expert's row of the float32 router goes with it.
    assert weights.experts_s == pytest.approx(experts / 1e11, rel=0.01)
    assert weights.seconds(1) == pytest.approx(weights.always_s + weights.experts_s / 4)
    assert weights.seconds(100) == pytest.approx(weights.always_s + weights.experts_s)


def test_ranks_share_what_they_read(model: ModelConfig):
    alone, shared = gpu_costs(model, GPU), gpu_costs(model, GPU, TensorParallel(0, 2))
    assert shared.decode.context_s == alone.decode.context_s / 2
    assert shared.prefill.pair_s == alone.prefill.pair_s / 2
    assert shared.decode.row_s == pytest.approx(alone.decode.row_s / 2, rel=0.01)
