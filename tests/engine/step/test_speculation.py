"""With speculation the tokens are the same, for every drafter, any number of drafts and any batch."""

from dataclasses import replace

import pytest
import torch

from engine.request import Request
from testing.engines.speculating import (
    LOGPROB_TOLERANCE,
    Ask,
    assert_nothing_is_owned,
    assert_same,
    gained_counts,
    greedy_asks,
    make_engine,
    sampled_asks,
    scripted,
    serve,
    short_asks,
    texts_of,
)
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams

MODES = ["none", "align", "all"]
DRAFTERS = ["mtp", "ngram"]
KS = [1, 2, 3, 5]
SWEPT = [1, pytest.param(2, marks=pytest.mark.exhaustive), 3, pytest.param(5, marks=pytest.mark.exhaustive)]
AHEAD = [0, 1]
MODELS = ["bundled", "dense", "moe"]


def model_of(k, drafter, mode, ahead):
    """Each of the three stands in every pair of columns; all of them everywhere would take a quarter hour."""
    return MODELS[(KS.index(k) + (drafter == "mtp") + MODES.index(mode) + ahead) % 3]


def with_stop(ask, token_id):
    return replace(ask, stop=frozenset([token_id]))


# --- greedy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", SWEPT)
def test_greedy_answers_equal_those_without_speculation(engines, models, k, drafter, mode, ahead):
    model_dir = models[model_of(k, drafter, mode, ahead)]
    engine = engines.get(model_dir, mode, k, drafter, ahead)
    asks = greedy_asks(10, seed=k % 2)  # 48 x 13 requests over all parameters
    expected = engines.plain(model_dir, asks)
    assert_same(serve(engine, asks, per_step=3), expected)
    assert_same(serve(engine, asks[1:4], concurrency=1), expected[1:4])
    assert_nothing_is_owned(engine)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", SWEPT)
def test_every_number_of_accepted_drafts_leaves_the_answers_as_they_are(engines, models, k, mode, ahead):
    model_dir = models[model_of(k, "ngram", mode, ahead)]
    engine = engines.get(model_dir, mode, k, "ngram", ahead)
    asks = greedy_asks(7, seed=7, num_tokens=12 + 6 * k)
    expected = engines.plain(model_dir, asks)
    texts = texts_of(asks, expected)
    before = gained_counts(engine)
    with scripted(engine, texts, "mixed"):
        for per_step in (32, 1):
            assert_same(serve(engine, asks, per_step=per_step), expected)
    gained = [now - then for now, then in zip(gained_counts(engine), before, strict=True)]
    assert min(gained) >= 5, gained
    accepted = sum(engine.stats().accepted_by_position)
    with scripted(engine, texts, "wrong"):
        assert_same(serve(engine, asks, concurrency=4), expected)
    assert sum(engine.stats().accepted_by_position) == accepted
    with scripted(engine, texts, "right"):
        answers = serve(engine, asks, per_step=2)
    assert_same(answers, expected)
    assert all(answer.stats.accepted_tokens == answer.stats.drafted_tokens for answer in answers)
    # The prompt's end brings one token, every step behind it 1 + k.
    assert all(a.num_outputs == 1 + -(-(len(a.tokens) - 1) // (1 + k)) for a in answers)
    assert_nothing_is_owned(engine)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("model", MODELS)
def test_32_rows_at_once_equal_each_one_alone(engines, models, model, ahead):
    engine = engines.get(models[model], "none", 3, "ngram", ahead)
    asks = greedy_asks(32, seed=11, num_tokens=12)
    expected = engines.plain(models[model], asks)
    with scripted(engine, texts_of(asks, expected), "mixed"):
        assert_same(serve(engine, asks), expected)
        assert_same(serve(engine, asks[:6], concurrency=1), expected[:6])


# --- sampled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_answers_and_their_logprobs_equal_those_without_speculation(
    engines, models, drafter, mode, ahead
):
    model_dir = models[model_of(3, drafter, mode, ahead)]
    engine = engines.get(model_dir, mode, 3, drafter, ahead)
    asks = sampled_asks(14, seed=3)
    expected = engines.plain(model_dir, asks)
    tolerance = 1e-5 if model_dir == models["bundled"] else LOGPROB_TOLERANCE
    answers = serve(engine, asks, per_step=3)
    assert_same(answers, expected, tolerance)
    assert {a.finish_reason for a in answers} == {"stop", "length"} or model_dir == models["bundled"]
    with scripted(engine, texts_of(asks, expected), "mixed"):
        assert_same(serve(engine, asks, per_step=4), expected, tolerance)
    assert_nothing_is_owned(engine)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_that_switches_speculation_off_is_never_drafted_for(engines, models, drafter, ahead):
    engine = engines.get(models["bundled"], "all", 3, drafter, ahead)
    asks = [
        replace(ask, params=replace(ask.params, speculate=i % 2 == 0))
        for i, ask in enumerate(greedy_asks(10, seed=13, num_tokens=20))
    ]
    expected = engines.plain(models["bundled"], asks)
    with scripted(engine, texts_of(asks, expected), "right"):
        answers = serve(engine, asks)
    assert_same(answers, expected)
    for answer in answers + serve(engine, asks):
        if answer.request.params.speculate:
            assert answer.num_outputs < len(answer.tokens) or not answer.stats.accepted_tokens
        else:
            assert answer.num_outputs == len(answer.tokens)
            assert answer.stats.drafted_tokens == 0


# --- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_ends_in_the_middle_of_accepted_drafts(engines, models, mode, ahead):
    """At every token of a long answer: by ``max_tokens``, and by a stop token that right drafts follow."""
    model_dir = models["dense" if mode == "align" else "moe"]
    engine = engines.get(model_dir, mode, 5, "ngram", ahead)
    (whole,) = [
        replace(ask, params=SamplingParams(max_tokens=16, temperature=0)) for ask in greedy_asks(3, 17)[2:]
    ]
    (answer,) = engines.plain(model_dir, [whole])
    firsts = [i for i, token_id in enumerate(answer.tokens) if token_id not in answer.tokens[:i]]
    asks = [with_stop(whole, answer.tokens[i]) for i in firsts]
    asks += [replace(whole, params=SamplingParams(max_tokens=n, temperature=0)) for n in range(1, 17)]
    with scripted(engine, texts_of([whole] * len(asks), [answer] * len(asks)), "right"):
        answers = serve(engine, asks)
    ends = [i + 1 for i in firsts] + list(range(1, 17))
    assert [a.tokens for a in answers] == [answer.tokens[:end] for end in ends]
    assert [a.finish_reason for a in answers] == ["stop"] * len(firsts) + ["length"] * 16
    assert [a.num_outputs for a in answers] == [1 + -(-(end - 1) // 6) for end in ends]
    assert_nothing_is_owned(engine)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_that_fill_the_context_end_there(engines, models, drafter, ahead):
    """A length at which no block ends; drafting looks k tokens further."""
    limit = 43
    settings = {"max_model_len": limit, "block_size": 5}
    engine = engines.get(models["dense"], "all", 5, drafter, ahead, **settings)
    asks = [
        Ask(
            ask.prompt[:num_prompt],
            SamplingParams(max_tokens=limit - len(ask.prompt[:num_prompt]), temperature=0),
        )
        for ask, num_prompt in zip(greedy_asks(8, seed=19), (1, 2, 20, 30, 37, 39, 41, 42), strict=True)
    ]
    expected = engines.plain(models["dense"], asks)
    assert_same(serve(engine, asks), expected)
    for style in ("right", "mixed"):
        with scripted(engine, texts_of(asks, expected), style):
            assert_same(serve(engine, asks, concurrency=3), expected)
    assert_nothing_is_owned(engine)


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preempted_requests_carry_on_exactly(engines, models, drafter, mode, ahead):
    model_dir = models["moe" if drafter == "mtp" else "bundled"]
    settings = {"block_size": 4, "max_model_len": 160, "max_num_seqs": 12, "max_batch_tokens": 64}
    engine = make_engine(model_dir, mode, 3, drafter, ahead, **settings)
    engine.scheduler.owned.blocks.allocate(engine.scheduler.owned.blocks.num_free - 40)
    sampled = [
        replace(ask, prompt=ask.prompt[-24:], params=replace(ask.params, max_tokens=36))
        for ask in sampled_asks(6, seed=23)
    ]
    asks = short_asks(6, seed=23) + sampled
    expected = engines.plain(model_dir, asks)
    assert_same(serve(engine, asks), expected)
    with scripted(engine, texts_of(asks, expected), "mixed"):
        assert_same(serve(engine, asks, per_step=2), expected)
    assert engine.scheduler.num_preemptions > 2
    assert engine._store.num_bytes == 0
    assert_nothing_is_owned(engine, num_blocks=40)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_cancelled_requests_leave_nothing_and_change_nobody(engines, models, mode, drafter, ahead):
    model_dir = models[model_of(2, drafter, mode, ahead)]
    engine = engines.get(model_dir, mode, 2, drafter, ahead)
    asks = greedy_asks(6, seed=29) + sampled_asks(6, seed=29)
    expected = engines.plain(model_dir, asks)
    cancels = {1: 0, 3: 1, 4: 4, 7: 2, 9: 6}
    with scripted(engine, texts_of(asks, expected), "mixed"):
        scripted_answers = serve(engine, asks, 5, cancels=cancels)
    for answers in (scripted_answers, serve(engine, asks, 32, cancels=cancels)):
        kept = [i for i in range(len(asks)) if not answers[i].cancelled]
        assert_same([answers[i] for i in kept], [expected[i] for i in kept])
        assert len(kept) < len(asks) - 2
        for answer, whole in zip(answers, expected, strict=True):
            assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert_nothing_is_owned(engine)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("k", SWEPT)
def test_states_kept_while_drafts_were_right_and_wrong_serve_the_next_turn(engines, models, k, ahead):
    """A boundary's state comes from the step that passed it, not from a rejected try before or after."""
    model_dir = models[model_of(k, "ngram", "all", ahead)]
    engine = engines.get(model_dir, "all", k, "ngram", ahead)
    asks = greedy_asks(6, seed=31 + k, num_tokens=40)
    expected = engines.plain(model_dir, asks)
    with scripted(engine, texts_of(asks, expected), "mixed"):
        assert_same(serve(engine, asks, per_step=2), expected)
    turns = [
        Ask((*text, 11, 12, 13), SamplingParams(max_tokens=6, temperature=0))
        for text in texts_of(asks, expected)
    ]
    again = serve(engine, turns)
    assert_same(again, engines.plain(model_dir, turns))
    gains = [
        turn.request.measured.num_cached - answer.request.num_prompt
        for turn, answer in zip(again, expected, strict=True)
    ]
    assert sum(gain > 0 for gain in gains) >= 4, gains


# --- states that are kept --------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("mode", MODES)
def test_a_kept_state_is_the_one_behind_the_answer_and_carries_on(engines, models, mode, ahead):
    """Stopped at every place among right drafts, after mixed ones, and at ``max_tokens``."""
    model_dir = models["dense"]
    engine = engines.get(model_dir, mode, 5, "mtp", ahead)
    plain = engines.get(model_dir, "none", 0, None, 0)
    (whole,) = [
        replace(ask, params=SamplingParams(max_tokens=22, temperature=0))
        for ask in greedy_asks(3, seed=17)[2:]
    ]
    (answer,) = engines.plain(model_dir, [whole])
    firsts = [i for i, token_id in enumerate(answer.tokens[:14]) if token_id not in answer.tokens[:i]]
    asks = [replace(with_stop(whole, answer.tokens[i]), keeps_state=True) for i in firsts[1::2]]
    asks += [
        replace(whole, params=SamplingParams(max_tokens=n, temperature=0), keeps_state=True)
        for n in (1, 2, 4, 9)
    ]
    texts = texts_of([whole] * len(asks), [answer] * len(asks))
    references = serve(plain, asks)
    try:
        for style in ("right", "mixed"):
            with scripted(engine, texts, style):
                answers = serve(engine, asks, per_step=2)
            assert_same(answers, references)
            for ours, theirs in zip(answers, references, strict=True):
                assert_same_memory(engine, ours.request, plain, theirs.request)
            for ours in answers[::4]:
                assert_carries_on(engine, ours.request, texts[0])
            for ours in answers:
                engine.release(ours.request.request_id)
            assert_nothing_is_owned(engine)
    finally:
        for theirs in references:
            plain.release(theirs.request.request_id)


def assert_same_memory(engine, request, other_engine, other):
    """State and KV of the target's layers, up to rounding: a wrong position's differ by far more."""
    assert request.num_computed == other.num_computed == len(request.tokens) - 1
    for ours, theirs in zip(memory_of(engine, request), memory_of(other_engine, other), strict=False):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def memory_of(engine, request):
    layers, size = engine.caches.layers, engine.config.block_size
    slot = request.memory.state_slot
    tensors = [state[slot] for state in (*layers.conv, *layers.ssm)]
    at = torch.arange(request.num_computed)
    blocks = torch.tensor(request.memory.block_ids)[at // size]
    num_layers = engine.model.config.cache_spec().attn_layers
    return tensors + [kv[blocks, :, at % size] for kv in (*layers.k[:num_layers], *layers.v[:num_layers])]


def assert_carries_on(engine, kept, text):
    """Another request takes over the held memory, as from another server, and continues the answer."""
    num_tokens = kept.num_computed
    ticket = Ticket(
        "next", 0, 0, "h:1", "i", num_tokens, tuple(kept.memory.block_ids), kept.memory.state_slot, 1.0, None
    )
    params = SamplingParams(max_tokens=len(text) - len(kept.tokens), temperature=0)
    request = Request("next", list(kept.tokens), params, ticket=ticket)
    engine.add(request)
    assert engine.step().to_transfer == [request]
    first = len(request.memory.nodes)
    for theirs, ours in list(zip(kept.memory.block_ids, request.memory.block_ids, strict=False))[first:]:
        engine.caches.kv[ours] = engine.caches.kv[theirs]
    engine.caches.state[request.memory.state_slot] = engine.caches.state[kept.memory.state_slot]
    assert engine.transferred(request, error=None, settled=True) == []
    while not engine.step().did_nothing:
        pass
    assert request.tokens == text


# --- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("model", MODELS)
def test_logits_that_are_not_finite_end_one_request_only(engines, models, model, ahead):
    engine = engines.get(models[model], "none", 3, "mtp", ahead, sanitize=False)
    asks = [
        replace(ask, params=SamplingParams(max_tokens=16, temperature=0, logprobs=0))
        for ask in greedy_asks(7, seed=37)
    ]
    expected = engines.plain(models[model], asks)

    def damage(answers):
        if 3 <= len(answers[4].tokens) < 16 and not answers[4].request.finish_reason:
            engine.caches.kv[answers[4].request.memory.block_ids[0]] = float("nan")

    with scripted(engine, texts_of(asks, expected), "mixed"):
        answers = serve(engine, asks, on_step=damage)
        assert answers[4].finish_reason == "error"
        assert answers[4].tokens == expected[4].tokens[: len(answers[4].tokens)]
        assert_same(answers[:4] + answers[5:], expected[:4] + expected[5:])
    assert_same(serve(engine, asks), expected)  # in the same memory
    assert_nothing_is_owned(engine)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_what_a_wrong_draft_leaves_is_never_read(models, engines, model, mode, ahead):
    """Every wrong draft is a token whose embedding is NaN, so its KV, states and logits are NaN as well."""
    engine = make_engine(models[model], mode, 3, "ngram", ahead)
    asks = greedy_asks(6, seed=41, num_tokens=24)
    expected = engines.plain(models[model], asks)
    texts = texts_of(asks, expected)
    unused = min(
        set(range(engine.model.config.vocab_size)) - {token_id for text in texts for token_id in text}
    )
    engine.model.embeddings[unused] = float("nan")
    for style in ("mixed", "wrong"):
        with scripted(engine, texts, style, wrong_id=unused):
            assert_same(serve(engine, asks, per_step=2), expected)
    turns = [
        Ask((*text, 11, 12, 13), SamplingParams(max_tokens=6, temperature=0))
        for text in texts
        if unused not in (11, 12, 13)
    ]
    with scripted(engine, texts_of(turns, engines.plain(models[model], turns)), "wrong", wrong_id=unused):
        assert_same(serve(engine, turns), engines.plain(models[model], turns))
    assert_nothing_is_owned(engine)
