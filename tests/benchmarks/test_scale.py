"""The simulation of prefill and decode servers against queueing theory, and that nothing in it gets lost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from statistics import fmean

import pytest

from benchmarks.scale import goodput as scale
from benchmarks.scale.attention_alone import with_attention_alone
from benchmarks.scale.goodput import costs_from
from benchmarks.scale.simulation import ScaleSimulation, SimulatedRequest, poisson_requests
from benchmarks.scale.step_measurement import Point, fit
from engine.cost.goodput import Lengths, Objective, ServerLimits, server_rates
from engine.cost.gpu import GpuSpeed, gpu_costs
from engine.cost.step_cost import DecodeCost, HandoffCost, PrefillCost, StepCosts
from engine.models import read_config
from twinfang.flags.table import BUNDLED_MODEL

MODEL = read_config(BUNDLED_MODEL)
GPU = GpuSpeed(flops_per_s=1e12, bytes_per_s=1e11, link_bytes_per_s=1e10)
INSTANT_HANDOFF = HandoffCost(0.0, 0, 0, 1.0)
COSTS = StepCosts(
    PrefillCost(step_s=0.002, token_s=1e-4, pair_s=1e-9),
    DecodeCost(step_s=0.004, row_s=2e-4, context_s=1e-8),
    HandoffCost(0.003, state_bytes=1_000_000, token_bytes=1000, bytes_per_s=1e9),
)
LIMITS = ServerLimits(chunk_tokens=512, max_rows=8, num_blocks=400, block_size=16)
PROMPTS, ANSWERS = Lengths(300, 0.8, 2000), Lengths(40, 0.8, 400)


def simulated(seed: int = 0, num: int = 400, per_s: float = 30.0):
    requests = poisson_requests(num, PROMPTS, ANSWERS, seed, per_s)
    simulation = ScaleSimulation(COSTS, LIMITS, num_prefill=2, num_decode=3, seed=seed)
    simulation.answer(requests)
    return simulation, requests


@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_equal_prompts_wait_as_an_m_d_1_queue_says(rho: float):
    service_s = 0.01
    costs = StepCosts(PrefillCost(service_s, 0.0, 0.0), DecodeCost(0.0, 0.0, 0.0), INSTANT_HANDOFF)
    limits = ServerLimits(chunk_tokens=99, max_rows=8, num_blocks=1000, block_size=16)  # a prompt a step
    requests = poisson_requests(12_000, Lengths(100), Lengths(1), seed=1, per_s=rho / service_s)
    ScaleSimulation(costs, limits, num_prefill=1, num_decode=1).answer(requests)
    expected_s = service_s + rho * service_s / (2 * (1 - rho))
    assert fmean(one.ttft_s for one in requests) == pytest.approx(expected_s, rel=0.05)


def test_rows_of_a_decode_server_are_rate_times_stay():
    costs = StepCosts(PrefillCost(0.0, 0.0, 0.0), DecodeCost(0.01, 0.0, 0.0), INSTANT_HANDOFF)
    limits = ServerLimits(chunk_tokens=1000, max_rows=1000, num_blocks=100_000, block_size=16)
    requests = poisson_requests(4000, Lengths(100), Lengths(50), seed=1, per_s=40.0)
    ScaleSimulation(costs, limits, num_prefill=1, num_decode=1).answer(requests)
    stays_s = [one.ended_s - one.arrived_s for one in requests]
    assert min(stays_s) >= 0.5 - 1e-9
    assert max(stays_s) <= 0.51 + 1e-9  # the step under way and its own 50
    assert all(one.tpot_s == pytest.approx(0.01) for one in requests)


def test_one_request_alone_takes_what_its_steps_take():
    request = SimulatedRequest(1.0, num_prompt=1001, num_answer=3)
    ScaleSimulation(COSTS, LIMITS, num_prefill=1, num_decode=1).answer([request])
    first_s = COSTS.prefill.prompt_s(1000, 512) + COSTS.handoff.seconds(1001) + COSTS.decode.seconds(1, 1001)
    assert request.ttft_s == pytest.approx(first_s)
    rest_s = COSTS.decode.seconds(1, 1002) + COSTS.decode.seconds(1, 1003)
    assert request.tpot_s == pytest.approx(rest_s / 2)


def test_every_request_is_answered_once_and_everything_is_given_back():
    simulation, requests = simulated()
    assert all(one.arrived_s < one.first_token_s <= one.ended_s for one in requests)
    for server in simulation.decode.values():
        assert server.num_admitted == 0
        assert server.free_blocks == LIMITS.num_blocks
        assert 1 < server.most_rows <= LIMITS.max_rows
    routers = (simulation._to_prefill, simulation._to_decode)
    assert all(known.num_tokens == 0 for router in routers for known in router.known.values())


def test_blocks_bound_rows_and_too_long_a_request_is_named():
    limits = ServerLimits(chunk_tokens=512, max_rows=8, num_blocks=20, block_size=16)
    simulation = ScaleSimulation(COSTS, limits, num_prefill=1, num_decode=1)
    simulation.answer([SimulatedRequest(0.0, 100, 60) for _ in range(6)])  # 10 blocks each
    assert [server.most_rows for server in simulation.decode.values()] == [2]
    with pytest.raises(ValueError, match="300 \\+ 60 tokens needs 23 blocks, a decode server has 20"):
        simulation.answer([SimulatedRequest(simulation.now, 300, 60)])


def test_the_seed_alone_decides():
    times = [[one.ended_s for one in simulated(seed)[1]] for seed in (0, 0, 1)]
    assert times[0] == times[1] != times[2]


def test_the_formula_is_near_the_simulation():
    objective = Objective(0.3, 0.012)
    rates = server_rates(COSTS, PROMPTS, ANSWERS, objective, LIMITS)
    load = scale.Workload("", PROMPTS, ANSWERS, objective)
    system = scale.System("", "", COSTS, LIMITS, (load,))
    for p, d in ((1, 4), (2, 1)):
        predicted = min(p * rates.prefill_per_s, d * rates.decode.requests_per_s)

        def attained(per_s: float, p: int = p, d: int = d) -> bool:
            return scale.attainment(system, load, p, d, per_s, seed=0, scale=1.0) >= objective.share

        assert scale.goodput(attained, predicted) == pytest.approx(predicted, rel=0.3)


@pytest.mark.parametrize("guess", [1.0, 9.0, 10.0, 30.0])
def test_goodput_is_found_from_any_guess(guess: float):
    assert scale.goodput(lambda rate: rate <= 10.0, guess) == pytest.approx(10.0, rel=0.04)
    assert scale.goodput(lambda rate: False, guess) == 0.0


def test_a_fit_finds_what_points_were_made_of_and_nothing_negative():
    cases = [(num, num * context) for num in (1, 8, 24) for context in (32, 512, 2000)]
    factors, error = fit([Point(num, all_, 0.004 + num * 2e-4 + all_ * 1e-8) for num, all_ in cases])
    assert factors == pytest.approx((0.004, 2e-4, 1e-8))
    assert error < 1e-6
    factors, _ = fit([Point(num, all_, 0.004 + num * 2e-4 - all_ * 1e-8) for num, all_ in cases])
    assert min(factors) == factors[2] == 0.0


def test_a_small_run_writes_figures_tables_and_takes_measured_costs_again(tmp_path, monkeypatch):
    measured = {"costs": scale.asdict(COSTS)}
    costs, document, report = tmp_path / "costs.json", tmp_path / "scale.md", tmp_path / "scale.json"
    costs.write_text(json.dumps({"measurement": measured}))
    names = ("goodput", "steps", "context")
    marks = "\n".join(
        f"<!-- {name}: written by benchmarks/scale/goodput.py -->\n<!-- end of {name} -->" for name in names
    )
    document.write_text(marks)
    flags = ("--servers", "2", "--scale", "0.1", "--costs", str(costs))
    written = ("--json", str(report), "--document", str(document))
    monkeypatch.setattr(sys, "argv", ["scale", *flags, *written])
    scale.main()
    found = json.loads(report.read_text())
    assert [one["source"] for one in found["systems"]] == ["computed", "measured"]
    assert found["systems"][1]["costs"] == measured["costs"]
    assert all(
        load["best"][0]["best"]["goodput"] > 0 for one in found["systems"] for load in one["workloads"]
    )
    assert "| chat, costs computed |" in document.read_text()


def test_attention_alone_keeps_no_state_and_kv_in_each_layer():
    costs, hybrid = (gpu_costs(one, GPU) for one in (with_attention_alone(MODEL), MODEL))
    assert costs.handoff.state_bytes == 0
    assert costs.handoff.token_bytes == hybrid.handoff.token_bytes * 5 // 2
    assert costs.prefill.pair_s == pytest.approx(hybrid.prefill.pair_s * 5 / 2)


def test_costs_come_back_from_their_figures():
    costs = gpu_costs(MODEL, GPU)
    assert costs_from(asdict(costs)) == costs
