"""Every family's logits and greedy tokens equal transformers', for all cuts into steps and all drafts."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from engine.checkpoint.weights import WeightFiles
from engine.cost.weight_size import weight_bytes
from engine.models import build_model, load_model, read_config
from testing.checkpoints.families import (
    CASES,
    REPRESENTATIVES,
    exhaustive_but,
    family_drafting,
    family_logits,
    make_family_checkpoint,
    mode_pairs,
)
from testing.checkpoints.model_table import Feature
from testing.engines.layer_driver import MtpDriver
from testing.engines.leading import lead_engine
from testing.engines.sequences import Driver, random_sequences
from testing.engines.speculating import Ask, assert_nothing_is_owned, serve
from testing.oracles.ties import MAX_TIES, count_ties
from testing.repository import ROOT
from wire.messages.sampling_params import SamplingParams

TOLERANCE = 1e-4
"""Largest difference of two logits, relative to the largest logit."""
NUM_TOKENS = 64
VOCAB_SIZE = 160


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    @cache
    def make(name):
        return make_family_checkpoint(tmp_path_factory.mktemp(name), name, seed=3)

    return make


def assert_as_transformers(model_dir, sequence, logits):
    expected = family_logits(model_dir, sequence.token_ids)
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"relative difference {error:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_random_pieces_of_several_rows_in_mixed_batches(checkpoints, record_property, name):
    """Whole prompts, chunks, single tokens as decode rows; rows come and go."""
    Feature.LOGITS.record(record_property, name)
    model_dir, choose = checkpoints(name), random.Random(1)
    sequences = random_sequences(VOCAB_SIZE, [1, 37, 64, 17, 90])
    driver = Driver(load_model(model_dir), len(sequences))
    for sequence, logits in zip(sequences, driver.run_in_random_pieces(sequences, choose), strict=True):
        assert_as_transformers(model_dir, sequence, logits)


class StoringDriver(Driver):
    """Runs steps whose hidden states nobody reads."""

    def compute(self, batch, next_ids):
        self.model.store(batch, self.caches.layers)
        return torch.zeros(len(next_ids), 1)


@pytest.mark.parametrize("name", CASES)
def test_a_step_without_hidden_states_leaves_the_same_kv_and_states(checkpoints, name):
    model, caches = load_model(checkpoints(name)), []
    for kind in (Driver, StoringDriver):
        sequences = random_sequences(VOCAB_SIZE, [1, 37, 64, 17, 90])
        driver = kind(model, len(sequences))
        driver.run_in_random_pieces(sequences, random.Random(1))
        caches.append(driver.caches)
    whole, stored = caches
    for one, other in ((whole.kv, stored.kv), (whole.state, stored.state)):
        torch.testing.assert_close(other[1:], one[1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("qwen3") and CASES[name].has_mtp])
def test_the_mtp_layer_of_qwen_yields_what_its_formula_does(checkpoints, name):
    model_dir = checkpoints(name)
    sequences = random_sequences(VOCAB_SIZE, [2, 37, 64])
    driver = MtpDriver(load_model(model_dir, mtp=True), len(sequences))
    first = driver.step([(one, len(one.token_ids) // 2) for one in sequences])
    second = driver.step([(one, len(one.token_ids) - one.num_computed) for one in sequences])
    for one, *parts in zip(sequences, first, second, strict=True):
        expected = family_drafting(model_dir, one.token_ids)
        error = (torch.cat(parts)[:-1] - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE, f"relative difference {error:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_a_plan_are_those_that_a_server_loads(checkpoints, name):
    config = read_config(checkpoints(name))
    weights = CountedFiles(checkpoints(name))
    for mtp in {False, CASES[name].has_mtp}:
        weights.num_bytes = 0
        build_model(config, weights, mtp=mtp)
        assert weight_bytes(config, mtp=mtp) == weights.num_bytes


class CountedFiles(WeightFiles):
    """Adds up what is taken."""

    num_bytes = 0

    def take(self, name, shape, **wanted):
        tensor = super().take(name, shape, **wanted)
        self.num_bytes += tensor.nbytes
        return tensor


@pytest.mark.parametrize(("name", "mode", "k"), mode_pairs(0, REPRESENTATIVES))
def test_greedy_tokens_equal_transformers_in_every_mode(checkpoints, engines, record_property, name, mode, k):
    Feature.of_mode(mode).record(record_property, name)
    if k:
        Feature.SPECULATION.record(record_property, name)
    model_dir, asks = checkpoints(name), greedy_asks()
    # With speculation a step is launched ahead, which runs without the sanitizer: decode passes are recorded.
    engine = engines.get(model_dir, mode, k, "mtp" if k and CASES[name].has_mtp else None, min(k, 1))
    answers = [*serve(engine, asks, per_step=3), *serve(engine, asks, concurrency=1)]
    assert_as_transformers_greedy(model_dir, answers)
    assert_nothing_is_owned(engine)


@pytest.mark.parametrize("name", exhaustive_but("granite-4", "qwen3-next"))
def test_two_ranks_answer_as_transformers(checkpoints, record_property, name):
    Feature.TENSOR_PARALLEL.record(record_property, name)
    drafter = "mtp" if CASES[name].has_mtp else "ngram"
    with lead_engine(checkpoints(name), 2, num_speculative=2, drafter=drafter) as engine:
        assert_as_transformers_greedy(checkpoints(name), serve(engine, greedy_asks()[3:], per_step=2))
        assert_nothing_is_owned(engine)


def greedy_asks():
    choose = random.Random(2)
    shared = [choose.randrange(6, 160) for _ in range(40)]
    lengths = [(0, 1), (0, 2), (0, 33), (40, 0), (40, 7), (32, 9), (40, 60)]
    return [
        Ask(
            (*shared[:length], *(choose.randrange(6, 160) for _ in range(extra))),
            SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
        )
        for length, extra in lengths
    ]


def assert_as_transformers_greedy(model_dir, answers):
    ties = 0
    for answer in answers:
        assert len(answer.tokens) == NUM_TOKENS
        prompt = answer.request.tokens[: answer.request.num_prompt]
        logits = family_logits(model_dir, [*prompt, *answer.tokens[:-1]])
        ties += count_ties(len(prompt), answer.tokens, logits)
    assert ties <= NUM_TOKENS * len(answers) * MAX_TIES


def test_the_walk_through_shows_the_file_as_it_is():
    shown = (ROOT / "engine" / "models" / "families" / "bamba.py").read_text(encoding="utf-8")
    assert shown in (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
