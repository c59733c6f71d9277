"""The planner's memory of steps is enough for what steps on the simulated GPU hold, and not twice as much."""

from __future__ import annotations

import gc

import pytest

from benchmarks.steps.model_shape import write_configuration
from engine.config import EngineConfig
from engine.cost.step_memory import StepMemory, activation_bytes, captured_prompts
from engine.models import read_config
from engine.parallel.tensor_parallel import ALONE
from engine.request import Request
from testing.simulated_gpu.without_memory import make_engine
from wire.messages.sampling_params import SamplingParams

ROWS, TOKENS = 16, 2048
EVERYTHING = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, presence_penalty=0.5)


def config_of(directory, role, k=0):
    return EngineConfig(
        directory,
        role,
        load_format="dummy",
        device="cuda",
        max_num_seqs=ROWS,
        max_batch_tokens=TOKENS,
        cache_memory_bytes=48 << 30,
        num_speculative=k,
        drafter="ngram" if k else None,
    )


@pytest.fixture(params=["8b-slice", "nano-slice"])
def directory(request, tmp_path):
    return write_configuration(request.param, tmp_path, max_model_len=8192)


def memory_of(config):
    model = read_config(config.model_dir, config.dtype, "cuda")
    prompts, most = captured_prompts(config), config.max_batch_tokens
    demand = config.demand(model)
    return StepMemory.of(model, demand, ALONE, max_batch_tokens=most, prompt_graphs=prompts)


def held_by(gpu, engine, num_steps):
    """Returns the most bytes that the next steps hold beside what is held before them."""
    gc.collect()  # what waits for the collector is held until then
    before = gpu.held.peak_bytes = gpu.held.num_bytes
    with gpu:
        for _ in range(num_steps):
            engine.step()
    return gpu.held.peak_bytes - before


def test_a_prompts_step(directory):
    config = config_of(directory, "prefill")
    gpu, engine = make_engine(config, [1])
    with gpu:
        engine.add(Request("long", [5] * (2 * TOKENS + 1), None))
    held = held_by(gpu, engine, 2)
    assert held <= memory_of(config).eager < 1.5 * held


@pytest.mark.parametrize("k", [1, 3])
def test_graphs_and_mixed_steps(directory, k):
    config = config_of(directory, "both", k)
    gpu, engine = make_engine(config, [ROWS])
    memory = memory_of(config)
    held = max(graph.held.peak_bytes for graph in gpu.graphs)
    assert held <= memory.graphs < 1.5 * held, (held, memory.graphs)
    with gpu:
        for i in range(ROWS):
            engine.add(Request(f"short {i}", [5] * 3, EVERYTHING))
        engine.step()
        engine.cancel("short 0")
        engine.add(Request("long", [5] * 6000, EVERYTHING))
    held = held_by(gpu, engine, 3)
    assert memory.eager * 0.3 < held <= memory.eager


def test_tensor_parallel_ranks_hold_their_share(directory):
    model = read_config(directory, "auto", "cuda")
    whole = activation_bytes(model, ALONE)
    assert whole // 4 < activation_bytes(model, config_of(directory, "both").planned_rank()) <= whole
