"""Whole decode steps that a CPU has recorded: the tokens of steps that are called from Python."""

import pytest

from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, LATENT_MOE, WITH_MOE, make_checkpoint
from testing.engines.speculating import Ask, serve
from tests.engine.step.test_bursts import make_engine
from wire.messages.sampling_params import SamplingParams

KINDS = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 0.9},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "penalised": {"temperature": 0, "frequency_penalty": 0.8},
    "reported": {"temperature": 0, "logprobs": 2},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("dense"), DENSE_WITH_MTP, seed=5)


def asks_of(*kinds):
    """Answers of different lengths, so that rows leave one by one."""
    return [
        Ask(
            tuple((i + 3) * n % 90 + 5 for n in range(5 + 4 * i)),
            SamplingParams(max_tokens=8 + 5 * i, ignore_eos=True, **KINDS[kind]),
            seed=i,
        )
        for i, kind in enumerate(kinds)
    ]


def call_by_call(engine):
    engine._runner._recorded = engine._runner._program._recorded = None
    return engine


@pytest.mark.parametrize(("drafter", "k"), [(None, 0), ("ngram", 3)])
@pytest.mark.parametrize(
    "kinds",
    [["greedy"] * 5, ["random"] * 3, ["filtered", "greedy", "random"], list(KINDS)],
    ids=["greedy", "random", "filtered", "all"],
)
@pytest.mark.parametrize("interval_s", [0.0, 60.0], ids=["single", "bursts"])
def test_a_replayed_step_gives_the_tokens_of_its_calls(model_dir, interval_s, kinds, drafter, k):
    settings = {"num_speculative": k, "drafter": drafter, "block_size": 8}
    replaying, calling = (make_engine(model_dir, interval_s, **settings) for _ in range(2))
    call_by_call(calling)
    for _ in range(2):  # what was recorded is replayed for other requests
        found, expected = (serve(engine, asks_of(*kinds)) for engine in (replaying, calling))
        assert [(one.tokens, one.logprobs) for one in found] == [
            (one.tokens, one.logprobs) for one in expected
        ]
    sizes = {num_rows for num_rows, _ in replaying._runner._recorded._recorded}
    assert sizes >= ({1} if "penalised" in kinds else {1, 2, 4})


@pytest.mark.parametrize("shape", [WITH_MOE, LATENT_MOE], ids=["experts", "latent"])
@pytest.mark.parametrize("k", [0, 3])
def test_replays_choose_the_experts_of_their_own_tokens(tmp_path, shape, k):
    model_dir = make_checkpoint(tmp_path, shape, seed=5)
    settings = {"num_speculative": k, "drafter": "ngram" if k else None, "block_size": 8}
    replaying, calling = (make_engine(model_dir, 60.0, **settings) for _ in range(2))
    call_by_call(calling)
    for _ in range(2):
        found, expected = (
            [one.tokens for one in serve(engine, asks_of("greedy", "random", "greedy"))]
            for engine in (replaying, calling)
        )
        assert found == expected
    assert replaying._runner._recorded._recorded


def test_steps_in_which_torch_computes_are_not_recorded(model_dir):
    engine = make_engine(model_dir, 60.0)
    warmed_up = set(engine._runner._recorded._recorded)
    serve(engine, asks_of("penalised", "penalised"))
    assert set(engine._runner._recorded._recorded) == warmed_up
    assert (2, 1) in engine._runner._program._recorded._recorded, "but the model's passes are"


def test_steps_with_an_mtp_layer_are_not_recorded(model_dir):
    engine = make_engine(model_dir, 60.0, num_speculative=2, drafter="mtp")
    serve(engine, asks_of("greedy", "greedy"))
    assert engine._runner._recorded._recorded == {}


def test_a_sanitized_engine_records_nothing(model_dir):
    engine = make_engine(model_dir, 0.0, sanitize=True)
    serve(engine, asks_of("greedy"))
    assert engine._runner._recorded is None
