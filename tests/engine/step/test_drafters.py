"""Drafts depend only on a request's own tokens, not on where they were computed or on other requests."""

import inspect
import textwrap
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from testing.engines.mtp_oracle import MtpOracle
from testing.engines.speculating import (
    Ask,
    ScriptedDrafter,
    assert_same,
    greedy_asks,
    make_engine,
    sampled_asks,
    serve,
    short_asks,
    texts_of,
)
from wire.messages.sampling_params import SamplingParams

K = 3
NGRAM_MIN, NGRAM_MAX = 2, 4
SMALL = {"block_size": 4, "max_model_len": 160, "max_num_seqs": 8, "max_batch_tokens": 40}


@pytest.fixture(scope="module")
def models(bundled_model, tmp_path_factory):
    return {
        "bundled": bundled_model,
        "dense": make_checkpoint(tmp_path_factory.mktemp("dense"), DENSE_WITH_MTP, seed=5),
        "moe": make_checkpoint(tmp_path_factory.mktemp("moe"), MOE_WITH_MTP, seed=5),
    }


class Recorder:
    """In the place of an engine's drafter: notes what that drafts, and may put other drafts over it."""

    is_recorded = False

    def __init__(self, engine, over=None):
        runner = engine._runner
        self.drafts: dict[tuple[str, int], list[int]] = {}
        """By request and number of known tokens."""
        self.num_blocks: dict[tuple[str, int], int] = {}
        self._own, self._over, self._state = runner._drafter, over, runner.state
        self._requests: dict[int, Request] = {}
        runner._drafter = runner._program._drafter = self

    def fill(self, request):
        self._requests[request.row] = request
        self._own.fill(request)
        if self._over is not None:
            self._over.fill(request)

    def draft(self, step, hidden):
        state = self._state
        budgets = state.num_drafts.tolist()
        self._own.draft(step, hidden)
        for row in step.rows.tolist():
            num_drafts = int(state.num_drafts[row])
            assert num_drafts <= budgets[row]
            if budgets[row] and state.active[row]:
                known = int(state.num_computed[row]) + 1
                assert known + budgets[row] < int(state.limit[row]), "the last draft could not be tried"
                name = self._requests[row].request_id
                self.drafts[name, known] = state.tokens[row, 1 : 1 + num_drafts].tolist()
                self.num_blocks[name, known] = len(self._requests[row].memory.block_ids)
        if self._over is not None:
            self._over.draft(step, hidden)


def tight(engine, num_blocks=40):
    """So few blocks that requests are preempted: room for one sequence of full length."""
    owned = engine.scheduler.owned
    owned.blocks.allocate(owned.blocks.num_free - num_blocks)
    return engine


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
@pytest.mark.parametrize(("model", "mode"), [("dense", "none"), ("dense", "all"), ("moe", "align")])
def test_mtp_drafts_are_those_of_the_formula_after_any_number_of_accepted_drafts(models, model, mode, ahead):
    """In chunks, in mixed batches, from cached blocks, preempted and resumed."""
    asks = short_asks(7, seed=3)
    expected = serve(make_engine(models[model], "none", 0, None, 0), asks)
    engine = tight(make_engine(models[model], mode, K, "mtp", ahead, **SMALL))
    recorder = Recorder(engine, ScriptedDrafter(engine, texts_of(asks, expected), "mixed", None))
    for _ in range(2):  # the second time from what is cached
        assert_same(serve(engine, asks, per_step=2), expected)
    assert engine.scheduler.num_preemptions > 0
    oracle, texts = MtpOracle(models[model]), texts_of(asks, expected)
    assert len(recorder.drafts) > 60
    num_short = 0
    for (name, known), drafts in list(recorder.drafts.items())[::3]:
        # Draft i takes KV at the known tokens and i - 2 more. At a prompt's end, or when a request comes
        # back, there may be no block for those yet: such drafts are guesses at guesses.
        num_exact = recorder.num_blocks[name, known] * SMALL["block_size"] - known + 2
        num_short += num_exact < len(drafts)
        formula = oracle.drafts(texts[int(name)][:known], K)[0]
        assert drafts[:num_exact] == formula[: len(drafts)][:num_exact], (name, known)
    assert num_short < len(recorder.drafts) / 3 / 5


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_ngram_drafts_are_what_followed_the_same_tokens_before(models, mode, ahead):
    asks = short_asks(8, seed=4)
    engine = tight(make_engine(models["bundled"], mode, K, "ngram", ahead, **SMALL))
    recorder = Recorder(engine)
    answers = serve(engine, asks, per_step=2)
    assert engine.scheduler.num_preemptions > 0
    texts = texts_of(asks, answers)
    for (name, known), drafts in recorder.drafts.items():
        text = texts[int(name)][:known]
        budget = min(K, len(texts[int(name)]) - known - 1)
        assert drafts == looked_up(text, budget), (name, known)
    assert sum(len(drafts) == K for drafts in recorder.drafts.values()) > 5
    assert sum(not drafts for drafts in recorder.drafts.values()) > 5
    assert sum(engine.stats().accepted_by_position) > 5


def looked_up(text, budget):
    """The longest of the last tokens' runs that stands in the text before, where it does so last.

    What followed it there is repeated where the budget is longer.
    """
    for length in range(min(NGRAM_MAX, len(text) - 1), NGRAM_MIN - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                followed = text[start + length :]
                return (followed * budget)[:budget]
    return []


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_drafts_do_not_depend_on_company(models, drafter):
    """Of sampled requests too, whose MTP drafts are drawn with their own seeds."""
    asks = sampled_asks(11, seed=6)
    engine = make_engine(models["dense"], "none", K, drafter, 0)
    recorder = Recorder(engine)
    alone = serve(engine, asks, concurrency=1)
    drafts_alone, recorder.drafts = recorder.drafts, {}
    assert_same(serve(engine, asks, per_step=3), alone)
    assert recorder.drafts == drafts_alone
    names = {name for name, _ in drafts_alone}
    assert len(names) > 5
    assert not any(asks[int(name)].params.speculate is False for name in names)


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_no_draft_stands_where_no_token_may(models, drafter, max_tokens):
    """The last token an answer may have is never drafted: it comes with the step before as its bonus."""
    engine = make_engine(models["dense"], "none", K, drafter, 0, max_model_len=64)
    recorder = Recorder(engine)
    phrase = (20, 21, 22, 23)
    ask = Ask(phrase * 5, SamplingParams(max_tokens=max_tokens, temperature=0))
    serve(engine, [ask])
    drafts = {known: len(drafts) for (_, known), drafts in recorder.drafts.items()}
    assert all(known + number < 20 + max_tokens for known, number in drafts.items())
    assert (21 in drafts) == (max_tokens > 2)  # behind the first token there is room for one and the bonus


def test_a_prefill_server_fills_the_mtp_layers_kv_and_drafts_nothing(models):
    settings = {"device": "cpu", "max_num_seqs": 4, "max_batch_tokens": 24, "cache_memory_bytes": 32 << 20}
    settings |= {"cache_mode": "none", "num_speculative": K, "drafter": "mtp"}
    source = Engine(EngineConfig(models["dense"], "prefill", **settings))
    sink = Engine(EngineConfig(models["dense"], "both", **settings))
    prompt = greedy_asks(4, seed=8)[3].prompt
    prefilled = Request("prefilled", list(prompt), None)
    source.add(prefilled)
    while "prefilled" not in source.scheduler.held:
        source.step()
    whole = Request("whole", list(prompt), SamplingParams(max_tokens=8, temperature=0))
    sink.add(whole)
    while not whole.num_output:
        sink.step()
    at = torch.arange(len(prompt) - 1)
    for ours, theirs in zip(source.caches.layers.k + source.caches.layers.v, _kv(sink), strict=True):
        mine = ours[torch.tensor(prefilled.memory.block_ids)[at // 16], :, at % 16]
        expected = theirs[torch.tensor(whole.memory.block_ids)[at // 16], :, at % 16]
        assert (mine - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert source._runner.state.tokens.shape[1] == 1
    assert len(_kv(sink)) == 2 * (sink.model.config.cache_spec().attn_layers + 1)


def _kv(engine):
    return engine.caches.layers.k + engine.caches.layers.v


def test_the_bundled_models_layer_drafts_what_the_model_says(bundled_model):
    """A trained layer tells a wrong token, position or hidden state, to which random weights are blind."""
    tokenizer = Tokenizer.from_file(str(bundled_model / "tokenizer.json"))
    token_ids = tokenizer.encode(inspect.getsource(textwrap)).ids
    params = SamplingParams(max_tokens=40, temperature=0)
    asks = [Ask(tuple(token_ids[start : start + 90]), params) for start in range(0, 900, 150)]
    engine = make_engine(bundled_model, "none", K, "mtp", 0)
    serve(engine, asks)
    drafted, accepted = engine.stats().drafted_by_position, engine.stats().accepted_by_position
    assert accepted[0] > 0.5 * drafted[0], (drafted, accepted)
    assert accepted[1] > 0.5 * accepted[0], (drafted, accepted)
    sampled = [replace(ask, params=replace(params, temperature=0.8), seed=i) for i, ask in enumerate(asks)]
    before = sum(engine.stats().accepted_by_position)
    serve(engine, sampled)
    assert sum(engine.stats().accepted_by_position) - before > 20
