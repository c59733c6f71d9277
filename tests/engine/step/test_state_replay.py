"""Decode rows that replay have the bits of rows with speculative slots, whoever reads their states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.engine import Engine
from engine.request import Request
from testing.checkpoints.families import make_family_checkpoint
from testing.engines.agreement import all_at_once, answers_of, handed_over, one_by_one, tokens_of
from testing.engines.agreement import request as scored_request
from testing.engines.handing_over import assert_all_free, copy, make_engine, prompts
from testing.engines.speculating import (
    Answer,
    assert_nothing_is_owned,
    gained_counts,
    greedy_asks,
    sampled_asks,
    scripted,
    serve,
    short_asks,
    texts_of,
)
from testing.engines.speculating import make_engine as make_drafting
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams

K = 3
SMALL = {"block_size": 4, "max_model_len": 160, "max_num_seqs": 6, "max_batch_tokens": 40}
REPLAY = {"speculative_state": "replay", "sanitize": False}
SLOTS = {"speculative_state": "slots", "sanitize": False}
exhaustive = pytest.mark.exhaustive


def rare(*values):
    """Return cases that only ``make test-all`` runs."""
    return [pytest.param(value, marks=exhaustive) for value in values]


@pytest.fixture(scope="module")
def models(models, tmp_path_factory):
    return {**models, "delta": make_family_checkpoint(tmp_path_factory.mktemp("delta"), "qwen3-next")}


def bits(answers: list[Answer]) -> list[object]:
    return [(one.said, one.logprobs, one.prompt_logprobs) for one in answers]


def all_kinds(seed: int):
    """Return requests with long answers, and requests that are sampled in all ways."""
    return [*sampled_asks(6, seed), *short_asks(4, seed)]


@contextmanager
def short_of_blocks(engine: Engine, num_blocks: int = 40) -> Iterator[None]:
    """Leave room for one sequence of full length, so that requests are preempted."""
    blocks = engine.scheduler.owned.blocks
    taken = blocks.allocate(blocks.num_free - num_blocks)
    yield
    blocks.free(taken)


GRID = [
    ("dense", "none", "mtp", 1),
    ("delta", "all", "ngram", 1),
    *(
        pytest.param(model, mode, drafter, ahead, marks=exhaustive)
        for model, drafter in [("bundled", "ngram"), ("dense", "mtp"), ("moe", "mtp"), ("delta", "ngram")]
        for mode in ("none", "align", "all")
        for ahead in (0, 1)
    ),
]


@pytest.mark.parametrize(("model", "mode", "drafter", "ahead"), GRID)
def test_replays_have_the_bits_of_slots_and_the_tokens_of_no_drafts(
    models, engines, model, mode, drafter, ahead
):
    """Cold and from cached prefixes, in chunks and mixed batches, preempted and resumed."""
    asks = all_kinds(seed=6)
    expected = engines.plain(models[model], asks)
    settings = mode, K, drafter, ahead
    slots, replay = (make_drafting(models[model], *settings, **SMALL, **form) for form in (SLOTS, REPLAY))
    assert replay.capacity.num_slots < slots.capacity.num_slots
    with short_of_blocks(slots), short_of_blocks(replay):
        for _ in range(2):
            found, theirs = (serve(engine, asks, per_step=2) for engine in (replay, slots))
            assert [one.said for one in found] == [one.said for one in expected]
            assert [one.said for one in found] == [one.said for one in theirs]
            if mode == "none":  # else their prompts may start from other cached states
                assert bits(found) == bits(theirs)
        assert replay.scheduler.num_preemptions > 0
    assert_nothing_is_owned(replay)


@pytest.mark.parametrize("style", ["mixed", *rare("right", "wrong")])
@pytest.mark.parametrize("k", [2, *rare(1, 5)])
def test_any_number_of_drafts_may_be_accepted(models, engines, style, k):
    """Boundaries of cached states are passed at every position of a row."""
    asks = greedy_asks(8, seed=5, num_tokens=30)
    expected = engines.plain(models["bundled"], asks)
    engine = make_drafting(models["bundled"], "all", k, "ngram", 0, **{**SMALL, **REPLAY})
    with scripted(engine, texts_of(asks, expected), style):
        for _ in range(2):
            assert [one.said for one in serve(engine, asks, 5)] == [one.said for one in expected]
    counts = gained_counts(engine)
    if style == "mixed":
        assert all(counts), counts
    assert_nothing_is_owned(engine)


@pytest.mark.parametrize("mode", ["all", *rare("none", "align")])
@pytest.mark.parametrize("model", ["bundled", *rare("delta")])
def test_states_that_are_handed_over_give_the_same_tokens(models, model, mode):
    settings = {"cache_mode": mode, "max_batch_tokens": 64, "max_num_seqs": 5}
    texts = [[6 + token % 150 for token in text] for text in prompts(4, seed=3)]
    alone = one_by_one(make_engine(models[model], "both", **settings), texts)
    settings |= {"num_speculative": K, "drafter": "ngram", **REPLAY}
    source, sink = (make_engine(models[model], role, **settings) for role in ("prefill", "decode"))
    assert (source.capacity.replays, sink.capacity.replays) == (False, True)
    for _ in range(2):  # the second time from cached prefixes
        assert tokens_of(handed_over(source, sink, texts)) == tokens_of(alone)
    assert tokens_of(all_at_once(make_engine(models[model], "both", **settings), texts)) == tokens_of(alone)


@pytest.mark.parametrize("mode", ["all", *rare("align")])
def test_later_turns_start_from_states_inside_answers(models, mode):
    """Answers pass boundaries while drafts are rejected. What is cached there is what the next turn reads."""
    plain = make_drafting(models["bundled"], "none", 0, None, 0, **SMALL, sanitize=False)
    engine = make_drafting(models["bundled"], mode, K, "ngram", 1, **SMALL, **REPLAY)
    texts = [list(ask.prompt[:40]) for ask in greedy_asks(5, seed=7)]
    for turn in range(3):
        params = SamplingParams(max_tokens=19, temperature=0)
        ours, theirs = (
            [Request(f"{turn}.{i}", list(text), params) for i, text in enumerate(texts)] for _ in range(2)
        )
        for one, requests in ((engine, ours), (plain, theirs)):
            for request in requests:
                one.add(request)
            answers_of_all(one)
        assert [request.tokens for request in ours] == [request.tokens for request in theirs]
        if turn and mode == "all":
            assert all(one.measured.num_cached > len(texts[i]) - 15 for i, one in enumerate(ours))
        texts = [[*request.tokens, 50 + turn, 60] for request in ours]


def arrive(source: Engine, sink: Engine, kept: Request, tokens: list[int], **fields: object) -> Request:
    """Let a request with these tokens begin with the memory that the other server holds, and copy it."""
    name, ids = f"{kept.request_id}'", tuple(kept.memory.block_ids)
    ticket = Ticket(name, 0, 0, "h:1", "i", kept.num_computed, ids, kept.memory.state_slot, 1.0, None)
    arriving = Request(name, tokens, kept.params, ticket=ticket, **fields)
    sink.add(arriving)
    while arriving not in sink.step().to_transfer:
        pass
    copy(source, sink, arriving)
    source.release(kept.request_id)
    assert sink.transferred(arriving, error=None, settled=True) == []
    return arriving


def move(source: Engine, sink: Engine, request: Request) -> Request:
    """Let a decoding request move to another server, as a drain does."""
    source.move_all()
    (kept,) = source.step().kept
    assert kept is request
    return arrive(source, sink, request, list(request.tokens), num_answered=request.num_output)


@pytest.mark.parametrize("ahead", [1, *rare(0)])
def test_a_kept_state_is_complete_though_a_later_step_is_in_flight(models, ahead):
    settings = {"num_speculative": K, "drafter": "ngram", "max_num_seqs": 3, "cache_mode": "none"}
    source = make_engine(models["bundled"], "both", steps_ahead=ahead, **settings, **REPLAY)
    sink = make_engine(models["bundled"], "both", **settings, **SLOTS)
    for length in range(5, 12):
        params = SamplingParams(max_tokens=length, temperature=0)
        first = Request(f"{length}", [40 + i % 7 for i in range(20 + length)], params, keeps_state=True)
        source.add(first)
        kept = []
        while not kept:
            kept = source.step().kept
        following = [*first.tokens, 70, 71, 72]
        arriving = arrive(source, sink, kept[0], list(following))
        whole = Request(f"{length} again", list(following), params)
        sink.add(whole)
        answers_of_all(sink)
        assert arriving.tokens == whole.tokens


@pytest.mark.parametrize("num_steps", [3, *rare(1, 2, 4, 6)])
@pytest.mark.parametrize("mode", ["none", *rare("all")])
def test_answers_go_on_where_they_move_to(models, mode, num_steps):
    """To a server that replays, and to one with a slot for every position."""
    settings = {"cache_mode": mode, "max_num_seqs": 3, "num_speculative": K, "drafter": "ngram"}
    settings["stream_interval_s"] = 0.0  # so many steps, not bursts
    first, second = (make_engine(models["bundled"], "both", **settings, **REPLAY) for _ in range(2))
    third = make_engine(models["bundled"], "both", **settings, **SLOTS)
    params = SamplingParams(max_tokens=80, temperature=0)
    prompt = [40 + i % 7 for i in range(31)]
    whole = Request("whole", list(prompt), params)
    third.add(whole)
    answers_of_all(third)
    moving = Request("moving", list(prompt), params)
    first.add(moving)
    steps(first, num_steps)
    assert moving.num_output > 0
    moving = move(first, second, moving)
    steps(second, num_steps)
    moving = move(second, third, moving)
    answers_of_all(third)
    assert moving.tokens == whole.tokens
    for engine in (first, second):
        assert_all_free(engine)


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def answers_of_all(engine: Engine) -> None:
    while not engine.step().did_nothing:
        pass


@pytest.mark.parametrize("mode", ["none", *rare("align", "all")])
@pytest.mark.parametrize("budget", [9, *rare(14)])
def test_forks_start_from_a_complete_state(models, mode, budget):
    """The step of the prompt's last token but one may be a decode row, whose token is pending."""
    settings = {"cache_mode": mode, "block_size": 4, "max_num_seqs": 4}
    plain = make_engine(models["bundled"], "both", **settings)
    drafting = settings | {"max_batch_tokens": 4 * (1 + K) + budget, "num_speculative": K, "drafter": "ngram"}
    engine = make_engine(models["bundled"], "both", **drafting, **REPLAY)
    for length in (4, 4 * (1 + K) + budget + 1, 4 * (1 + K) + budget + 2, 50):
        prompt = [40 + i % 11 for i in range(length)]
        params = SamplingParams(max_tokens=12, temperature=0.8)
        alone = [Request(f"{length}.{i}", list(prompt), params, seed=i) for i in range(4)]
        for one in alone:
            plain.add(one)
        answers_of_all(plain)
        first, *others = [Request(f"{length}.{i}", list(prompt), params, seed=i) for i in range(4)]
        first.forks = list(others)
        engine.add(first)
        answers_of_all(engine)
        assert [one.tokens for one in (first, *others)] == [one.tokens for one in alone]


def test_a_chunk_follows_a_decode_row_of_the_same_prompt(models):
    """In mode align, chunks of 7 tokens end one token before a block does, and that token is a decode row."""
    settings = {"cache_mode": "align", "block_size": 8, "max_num_seqs": 3}
    texts = prompts(6, seed=9, low=30, high=60)
    alone = one_by_one(make_engine(models["bundled"], "both", **settings), texts)
    tight = settings | {"max_batch_tokens": 2 * (1 + K) + 7, "num_speculative": K, "drafter": "ngram"}
    engine = make_engine(models["bundled"], "both", **tight, **REPLAY)
    kinds = set()
    launch = engine._runner.launch

    def noted(plan, *arguments):
        kinds.update(row.is_decode for row in plan.rows if row.end < row.request.num_given)
        return launch(plan, *arguments)

    engine._runner.launch = noted
    found = answers_of(engine, [scored_request(str(i), one) for i, one in enumerate(texts)])
    assert tokens_of(found) == tokens_of(alone)
    assert kinds == {True, False}


def test_kept_inputs_are_counted(models):
    """The bytes that the plan counts are those that the engine holds."""
    for model in ("dense", "delta"):
        engine = make_drafting(models[model], "none", K, "ngram", 0, **REPLAY)
        held = 0
        for layer in engine._runner._states.layers.kept:
            tensors = [layer.conv, *vars(layer.scan).values()]
            held += sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
        assert engine.capacity.kept_bytes == held
        assert engine.capacity.num_bytes == held + engine.caches.kv.nbytes + engine.caches.state.nbytes


def test_nothing_is_kept_without_drafts_or_with_slots(models):
    for k, form in ((0, {"sanitize": False}), (K, SLOTS), (K, {"sanitize": False})):
        engine = make_drafting(models["dense"], "none", k, "ngram" if k else None, 0, **form)
        assert engine.capacity.kept_bytes == 0
        assert engine._runner._states.layers.kept == []
