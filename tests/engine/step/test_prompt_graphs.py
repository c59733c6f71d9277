"""Prompts' steps as graphs, on the simulated GPU: they give the CPU's tokens, whatever ran before them."""

import pytest

from engine.config import EngineConfig
from engine.cost.step_memory import captured_prompts
from engine.group.data_parallel import DataParallel
from engine.step.passes.prompt_graphs import MOST_BOUNDARIES
from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, make_checkpoint
from testing.engines.speculating import Ask, serve
from testing.simulated_gpu.engines import SETTINGS, Setting, Simulated
from testing.simulated_gpu.gpu import SimulatedGpu
from testing.simulated_gpu.handoff import SimulatedHandoff
from testing.simulated_gpu.streams import AtOnce
from wire.messages.sampling_params import SamplingParams

ROOMY = (("max_batch_tokens", 192), ("max_model_len", 256))
LENGTHS = (150, 3, 64, 65, 128, 1, 192, 20, 230)
"""A long prompt first: what it leaves in the inputs must not show in shorter ones. The last one takes two
chunks, of which nobody reads the first one's hidden states."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("dense"), DENSE_WITH_MTP, seed=5)


def asks_of(lengths, num_tokens=4):
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return [Ask(tuple((7 * i + 3 * n) % 150 + 5 for i in range(n)), params) for n in lengths]


def prefill_steps(engine):
    return {run: engine.measures.steps["prefill", run] for run in ("graph", "eager")}


@pytest.mark.parametrize(
    "setting",
    [
        Setting("dense", more=ROOMY),
        Setting("dense", 2, "ngram", "all", (*ROOMY, ("state_block_size", 32))),
        Setting("dense", 2, "mtp", "align", ROOMY),
    ],
    ids=["no cache", "boundaries", "MTP layer"],
)
def test_a_prompt_alone_is_a_replay_and_gives_the_cpus_tokens(model_dir, setting):
    simulated = Simulated.make(setting, model_dir)
    asks = asks_of(LENGTHS)
    before = prefill_steps(simulated.engine)
    with simulated.gpu, simulated.gpu.watching():
        answers = serve(simulated.engine, asks, 1)
    assert [one.tokens for one in answers] == [one.tokens for one in simulated.expected(asks)]
    steps = {run: count - before[run] for run, count in prefill_steps(simulated.engine).items()}
    assert steps["eager"] == 0
    assert steps["graph"] >= len(LENGTHS)
    assert simulated.gpu.waits == {}


def test_a_prompt_with_more_boundaries_than_a_graph_has_runs_without_one(model_dir):
    setting = Setting("dense", mode="all", more=(*ROOMY, ("state_block_size", 16), ("block_size", 16)))
    simulated = Simulated.make(setting, model_dir)
    before = prefill_steps(simulated.engine)
    asks = asks_of([16 * (MOST_BOUNDARIES + 2) + 1])
    with simulated.gpu:
        answers = serve(simulated.engine, asks, 1)
    assert [one.tokens for one in answers] == [one.tokens for one in simulated.expected(asks)]
    assert prefill_steps(simulated.engine)["eager"] == before["eager"] + 1


def test_prefill_servers_replay_too(model_dir):
    setting = SETTINGS["ngram"]
    handoff = SimulatedHandoff(setting, model_dir, SimulatedGpu(AtOnce()))
    asks = asks_of([40, 9, 30])
    before = prefill_steps(handoff.source)
    answers = handoff.serve(asks, 0)
    expected = serve(setting.engine(model_dir, "cpu"), asks, 1)
    assert [one.tokens for one in answers] == [one.tokens for one in expected]
    assert prefill_steps(handoff.source)["graph"] > before["graph"]


def test_prompts_up_to_a_steps_tokens_are_captured(model_dir):
    assert captured_prompts(EngineConfig(model_dir, "prefill", max_batch_tokens=100, sanitize=False)) == [64]
    assert (
        captured_prompts(EngineConfig(model_dir, "both", max_batch_tokens=8192, sanitize=False))[-1] == 1024
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"role": "decode"},
        {"tensor_parallel": 2},
        {"expert_parallel": True, "data_parallel": DataParallel(0, 2)},
        {"sanitize": True},
    ],
)
def test_servers_that_capture_no_prompts_plan_no_memory_for_them(model_dir, settings):
    config = EngineConfig(model_dir, **{"role": "both", "sanitize": False, **settings})
    assert captured_prompts(config) == []
