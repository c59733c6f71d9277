"""Goodput of prefill and decode servers in simulated time, the best ratio, and the cost of a longer context.

    python -m benchmarks.scale.goodput --measure --json benchmarks/results/scale.json --plot docs/scale.png \\
        --document docs/scale.md

There are two systems: a model on GPUs with given rates (*computed* from its ``config.json``, without a GPU),
and, with ``--measure``, the bundled model on this machine's CPU, whose steps are *measured* first (``--costs
FILE`` takes those of an earlier run). Servers are simulated step by step (``scale_simulation.py``).
Everything except the measurement depends only on flags and seed.

| figure | is |
|---|---|
| goodput | highest rate of a Poisson stream at which 90 % of requests meet both objectives |
| formula | what ``twinfang plan`` computes instead: the lesser of prefill and decode servers' rates |
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.attention_alone import with_attention_alone
from benchmarks.scale.context_growth import crossing, growth, limits_of
from benchmarks.scale.plot import plot
from benchmarks.scale.report import write_report
from benchmarks.scale.simulation import ScaleSimulation, poisson_requests
from engine.checkpoint.model_config import ModelConfig
from engine.cost.goodput import LENGTH_SPREAD, Lengths, Objective, ServerLimits, ServerRates, server_rates
from engine.cost.gpu import GpuSpeed, gpu_costs
from engine.cost.step_cost import DecodeCost, HandoffCost, PrefillCost, StepCosts, WeightCost
from engine.models import read_config
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL

GIB = 1 << 30
SERVERS = (2, 4, 8)
REQUESTS = 2000
"""Requests of a run."""
MEASURED_SHARE = (0.3, 0.9)
"""The measured part of the arrivals: not the first, which find empty servers, nor the last, which have none
after them."""
COARSE, FINE_STEPS = 1.12, 2
"""Factor to a rate's first neighbours, and how often the interval between them is halved: to 3 %."""

NEMOTRON_8B: Mapping[str, object] = {
    "architectures": ["NemotronHForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "intermediate_size": 21504,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: Lengths
    answers: Lengths
    objective: Objective


def workload(name: str, prompt: int, answer: int, ttft_s: float, tpot_s: float, limit: int) -> Workload:
    """Returns lengths of prompts and answers; no sum exceeds ``limit``."""
    longest = min(limit // 2, 10 * answer)
    prompts, answers = (
        Lengths(prompt, LENGTH_SPREAD, limit - longest),
        Lengths(answer, LENGTH_SPREAD, longest),
    )
    return Workload(name, prompts, answers, Objective(ttft_s, tpot_s))


GPU_WORKLOADS = (
    workload("chat", 1000, 200, 0.5, 0.025, 8192),
    workload("documents", 4000, 100, 1.0, 0.025, 8192),
    workload("reasoning", 300, 1500, 0.5, 0.025, 8192),
)
CPU_WORKLOADS = (workload("short", 256, 64, 0.3, 0.05, 4096),)


@dataclass(frozen=True)
class System:
    name: str
    source: str
    costs: StepCosts
    limits: ServerLimits
    workloads: tuple[Workload, ...]


def attainment(
    system: System, load: Workload, num_prefill: int, num_decode: int, per_s: float, seed: int, scale: float
) -> float:
    """Returns the share of requests that meet both objectives when ``per_s`` arrive."""
    num = round(scale * REQUESTS)
    requests = poisson_requests(num, load.prompts, load.answers, seed, per_s)
    simulation = ScaleSimulation(
        system.costs, system.limits, num_prefill=num_prefill, num_decode=num_decode, seed=seed
    )
    simulation.answer(requests)
    first, last = (round(share * num) for share in MEASURED_SHARE)
    return sum(one.meets(load.objective) for one in requests[first:last]) / (last - first)


def goodput(attained: Callable[[float], bool], guess: float) -> float:
    """Returns the highest attained rate, searched from a guess; 0 if not even a hundredth of the guess is
    attained."""
    rate = guess
    if attained(rate):
        low = rate
        while attained(high := low * COARSE):
            low = high
    else:
        high = rate
        while not attained(low := high / COARSE):
            high = low
            if low < guess / 100:
                return 0.0
    for _ in range(FINE_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if attained(middle) else (low, middle)
    return low


def cells(
    system: System, load: Workload, rates: ServerRates, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields the goodput of every division of the given number of servers."""
    for p, d in ((p, num - p) for num in options.servers for p in range(1, num)):
        guess = min(p * rates.prefill_per_s, d * rates.decode.requests_per_s)

        def attained(per_s: float, p: int = p, d: int = d) -> bool:
            return attainment(system, load, p, d, per_s, options.seed, options.scale) >= load.objective.share

        found = goodput(attained, guess) if guess else 0.0
        print(f"{load.name:>10} {p:>3} : {d:<3} {found:>8.2f} {guess:>8.2f}", flush=True)
        yield {"num_prefill": p, "num_decode": d, "goodput": round(found, 3), "formula": round(guess, 3)}


def best_of(found: Sequence[dict[str, Any]], rates: ServerRates) -> list[dict[str, Any]]:
    """Returns the best division of each number of servers, simulated and by the formula."""
    best = []
    for num in sorted({cell["num_prefill"] + cell["num_decode"] for cell in found}):
        of_num = [cell for cell in found if cell["num_prefill"] + cell["num_decode"] == num]
        split = rates.best_split(num)
        chosen = next(cell for cell in of_num if cell["num_prefill"] == split.num_prefill)
        best.append(
            {
                "servers": num,
                "best": max(of_num, key=lambda cell: cell["goodput"]),
                "by_formula": chosen,
            }
        )
    return best


def simulated_system(system: System, options: argparse.Namespace) -> dict[str, Any]:
    """Simulates all workloads of a system."""
    print(f"\n{system.name}, {system.source}\n{'':>10} {'P : D':^9} {'goodput':>7} {'formula':>8}")
    results = []
    for load in system.workloads:
        rates = server_rates(system.costs, load.prompts, load.answers, load.objective, system.limits)
        found = list(cells(system, load, rates, options))
        results.append(
            {**asdict(load), "rates": asdict(rates), "cells": found, "best": best_of(found, rates)}
        )
    return {
        "name": system.name,
        "source": system.source,
        "costs": asdict(system.costs),
        "limits": asdict(system.limits),
        "workloads": results,
    }


@contextmanager
def model_directory(given: Path | None) -> Iterator[Path]:
    """Yields the given directory, or one with the shape of Nemotron-H 8B and no weights."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="twinfang-model-") as folder:
        path = Path(folder) / "nemotron-h-8b"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(NEMOTRON_8B), encoding="utf-8")
        yield path


def context_figures(model: ModelConfig, gpu: GpuSpeed, gpu_bytes: int) -> dict[str, Any]:
    costs, other = (gpu_costs(one, gpu) for one in (model, with_attention_alone(model)))
    equal = crossing(costs, other)
    return {
        "rows_read_as_much_at": equal and round(equal),
        "rows": [asdict(one) for one in growth(model, gpu, gpu_bytes)],
    }


def cpu_system(options: argparse.Namespace) -> tuple[System, dict[str, Any]] | None:
    """Returns the bundled model with steps measured now or by an earlier run; None if neither is asked
    for."""
    if options.costs is not None:
        systems = json.loads(options.costs.read_text(encoding="utf-8"))
        measured = systems["measurement"]
    elif options.measure:
        from benchmarks.scale.step_measurement import measure_costs

        before = machine()
        measured = {"machine": before, **measure_costs(BUNDLED_MODEL).figures()}
    else:
        return None
    limits = ServerLimits(2048, 64, (1 << 30) // (16 * measured["costs"]["handoff"]["token_bytes"]), 16)
    costs = costs_from(measured["costs"])
    return System(
        "bundled model, one CPU thread a server", "measured", costs, limits, CPU_WORKLOADS
    ), measured


def costs_from(figures: dict[str, Any]) -> StepCosts:
    """Restores step costs from the result of :func:`dataclasses.asdict`."""
    prefill, decode = (
        {**figures[name], "weights": WeightCost(**figures[name]["weights"])} for name in ("prefill", "decode")
    )
    return StepCosts(PrefillCost(**prefill), DecodeCost(**decode), HandoffCost(**figures["handoff"]))


def counts(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(item) for item in text.split(",")))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="with a config.json; default: the shape of Nemotron-H 8B")
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB")
    parser.add_argument("--gpu-tflops", type=float, default=600.0, help="what matrix products reach")
    parser.add_argument("--gpu-bandwidth", type=float, default=2800.0, help="GB/s that copies reach")
    parser.add_argument("--link-bandwidth", type=float, default=20.0, help="GB/s from server to server")
    parser.add_argument("--step-ms", type=float, default=0.5, help="of a step beside bytes and FLOP")
    parser.add_argument("--measure", action="store_true", help="the bundled model's steps on this machine")
    parser.add_argument("--costs", type=Path, help="take measured steps from an earlier run's JSON")
    parser.add_argument(
        "--servers", type=counts, default=SERVERS, metavar="N,…", help="prefill and decode; default: 2,4,8"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="requests of a run; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--plot", type=Path, help="draw them there")
    parser.add_argument("--document", type=Path, help="write the tables between its marks")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    gpu = GpuSpeed(
        options.gpu_tflops * 1e12,
        options.gpu_bandwidth * 1e9,
        options.link_bandwidth * 1e9,
        options.step_ms / 1e3,
    )
    gpu_bytes = int(options.gpu_memory * GIB)
    with model_directory(options.model) as directory:
        model = read_config(directory, "auto", "cuda")
    limits = limits_of(model, gpu_bytes, GPU_WORKLOADS[0].prompts.maximum or 8192)
    systems = [System(directory.name, "computed", gpu_costs(model, gpu), limits, GPU_WORKLOADS)]
    cpu = cpu_system(options)
    if cpu is not None:
        systems.append(cpu[0])
    return {
        "simulated": "the systems' costs alone decide: any machine gives the same",
        "seed": options.seed,
        "scale": options.scale,
        "gpu": {**asdict(gpu), "memory_bytes": gpu_bytes, "source": "assumed, not measured"},
        "measurement": cpu and cpu[1],
        "context": {"model": directory.name, **context_figures(model, gpu, gpu_bytes)},
        "systems": [simulated_system(one, options) for one in systems],
    }


def main() -> None:
    options = parse()
    report = measure(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(report, options.plot)
    if options.document:
        write_report(report, options.document)


if __name__ == "__main__":
    main()
