"""Several choices of one prompt compute it once, and each says what it says alone."""

from __future__ import annotations

import time

import pytest
from llguidance import LLMatcher

from engine.request import Request
from engine.step_result import RequestOutput
from testing.checkpoints.random_checkpoint import EOS_TOKEN_ID
from testing.engines.handing_over import assert_all_free, copy, make_engine, prefill
from testing.engines.leading import lead_engine, own
from wire.messages.sampling_params import SamplingParams

PROMPT = [40 + i % 23 for i in range(45)]
NUM_TOKENS = 20
STOP = frozenset([EOS_TOKEN_ID])
KINDS = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 1.0, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.0, "grammar": LLMatcher.grammar_from_regex("([a-z]| ){8,12}")},
)
GRID = [
    ("none", 0),
    ("all", 3),
    *(
        pytest.param(mode, k, marks=pytest.mark.exhaustive)
        for mode, k in [("none", 3), ("align", 0), ("align", 3), ("all", 0)]
    ),
]


def choices(num, kind, prompt=PROMPT, ticket=None):
    """A request with ``num - 1`` forks; choice i has seed i."""
    params = SamplingParams(max_tokens=NUM_TOKENS, **KINDS[kind])
    first, *forks = [
        Request(f"{kind}.{i}", list(prompt), params, seed=i, stop_token_ids=STOP) for i in range(num)
    ]
    first.forks, first.ticket = forks, ticket
    return first


def outputs_of(engine, until=lambda outputs: False):
    """Run until nothing is left to do; a step that waits for masks of a grammar does nothing, too."""
    outputs: list[RequestOutput] = []
    give_up = time.monotonic() + 60
    while not until(outputs):
        result = engine.step()
        outputs += result.outputs
        if result.did_nothing and not own(engine).scheduler.active:
            break
        assert time.monotonic() < give_up
    return outputs


def said(outputs):
    tokens = {}
    for output in outputs:
        assert output.error is None, output.error
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def alone(engine, num, kind, prompt=PROMPT):
    tokens = {}
    for one in [choices(num, kind, prompt), *choices(num, kind, prompt).forks]:
        one.forks = []
        engine.add(one)
        tokens |= said(outputs_of(engine))
    return tokens


@pytest.fixture(scope="module")
def expected(bundled_model):
    engine = make_engine(bundled_model, "both", cache_mode="none")
    return [alone(engine, 5, kind) for kind in range(len(KINDS))]


def settings(mode, k, **others):
    state_block = {"state_block_size": 16} if mode == "all" else {}
    return (
        {"cache_mode": mode, "num_speculative": k, "block_size": 8, "sanitize": True} | state_block | others
    )


@pytest.mark.parametrize(("mode", "k"), GRID)
def test_choices_say_what_they_say_alone_and_their_prompt_is_computed_once(bundled_model, expected, mode, k):
    engine = make_engine(bundled_model, "both", max_num_seqs=8, **settings(mode, k))
    for kind in range(len(KINDS)):
        before = engine.stats().prefill_tokens
        engine.add(choices(5, kind))
        assert said(outputs_of(engine)) == expected[kind]
        # Each choice computes the prompt's last token. Later prompts may be in the cache.
        assert engine.stats().prefill_tokens - before <= len(PROMPT) - 1 + 5
    assert_all_free(engine)


@pytest.mark.parametrize(("mode", "k"), GRID)
def test_one_handoff_serves_all_choices(bundled_model, expected, mode, k):
    source = make_engine(bundled_model, "prefill", **settings(mode, k))
    sink = make_engine(bundled_model, "decode", **settings(mode, k))
    for kind in range(len(KINDS)):
        first = choices(5, kind, ticket=prefill(source, PROMPT, f"{kind}.0"))
        sink.add(first)
        assert sink.step().to_transfer == [first]
        copy(source, sink, first)
        source.release(first.request_id)
        assert sink.transferred(first, error=None, settled=True) == []
        assert said(outputs_of(sink)) == expected[kind]
    assert sink.stats().prefill_tokens == 5 * len(KINDS)
    assert_all_free(sink)


@pytest.mark.parametrize(("mode", "k"), GRID)
@pytest.mark.parametrize("max_num_seqs", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_choices_without_a_row_wait_in_host_memory_with_one_copy(
    bundled_model, expected, mode, k, max_num_seqs
):
    engine = make_engine(bundled_model, "both", **settings(mode, k, max_num_seqs=max_num_seqs))
    engine.add(choices(5, 1))
    outputs = outputs_of(engine, until=lambda _: engine.scheduler.preempted)
    assert len(engine.scheduler.preempted) == 5 - max_num_seqs
    caches = engine.caches
    num_blocks = -(-(len(PROMPT) - 1) // caches.block_size)
    copied = num_blocks * caches.kv_layout.unit_bytes + caches.state_layout.unit_bytes
    assert engine._store.num_bytes == copied
    assert said(outputs + outputs_of(engine)) == expected[1]
    assert engine.scheduler.num_preemptions == 0
    assert engine._store.num_bytes == 0
    assert_all_free(engine)


def test_choices_share_the_full_blocks_of_their_prompt(bundled_model):
    engine = make_engine(bundled_model, "both", **settings("none", 0))
    engine.add(choices(5, 1))
    outputs_of(engine, until=lambda outputs: outputs)
    shared = {
        tuple(one.memory.block_ids[: (len(PROMPT) - 1) // 8]) for one in engine.scheduler.running.values()
    }
    assert len(engine.scheduler.running) == 5
    assert len(shared) == 1
    num_used = engine.scheduler.owned.blocks.capacity - engine.scheduler.owned.blocks.num_free
    assert num_used == (len(PROMPT) - 1) // 8 + 5


@pytest.mark.parametrize("mode", ["none", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_choices_that_grow_beyond_the_pool_are_preempted_and_end_exactly(bundled_model, expected, mode):
    engine = make_engine(bundled_model, "both", **settings(mode, 3, max_model_len=80))
    owned = engine.scheduler.owned
    owned.blocks.allocate(owned.blocks.num_free - 15)
    engine.add(choices(5, 2))
    assert said(outputs_of(engine)) == expected[2]
    assert engine.scheduler.num_preemptions > 0


def test_a_choice_that_is_cancelled_while_it_waits_leaves_the_others(bundled_model, expected):
    engine = make_engine(bundled_model, "both", **settings("none", 0, max_batch_tokens=16))
    first = choices(5, 1)
    engine.add(first)
    engine.step()
    assert engine.cancel("1.3").finish_reason == "cancelled"
    tokens = said(outputs_of(engine))
    assert tokens == {name: answer for name, answer in expected[1].items() if name != "1.3"}
    assert_all_free(engine)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_choices_end_with_the_one_that_computes_their_prompt(bundled_model, num_steps):
    engine = make_engine(bundled_model, "both", **settings("none", 0, max_batch_tokens=16))
    first = choices(5, 1)
    forks = list(first.forks)
    engine.add(first)
    for _ in range(num_steps):
        engine.step()
    engine.cancel(first.request_id)
    assert [(one.request_id, one.finish_reason) for one in outputs_of(engine)] == [
        (fork.request_id, "moved") for fork in forks
    ]
    assert engine.scheduler.active == []
    assert_all_free(engine)


def test_all_ids_of_a_request_with_forks_have_to_be_new(bundled_model):
    engine = make_engine(bundled_model, "both", **settings("none", 0))
    engine.add(Request("1.3", list(PROMPT), SamplingParams(max_tokens=2)))
    with pytest.raises(Exception, match=r"'1\.3' is in use"):
        engine.add(choices(5, 1))
    assert list(engine.scheduler.waiting) == ["1.3"]


def test_choices_move_one_by_one(bundled_model, expected):
    engine = make_engine(bundled_model, "decode", **settings("none", 3))
    engine.add(choices(5, 1))
    before = said(outputs_of(engine, until=lambda outputs: len(outputs) > 10))
    engine.move_all()
    result = engine.step()
    assert {one.request_id for one in result.kept} == {one.request_id for one in result.outputs}
    for one in result.kept:
        name = one.request_id
        assert one.tokens[len(PROMPT) :] == before[name] == expected[1][name][: len(before[name])]
        engine.digests(name)
        engine.release(name)
    assert_all_free(engine)


def test_another_client_that_waits_comes_before_forks(bundled_model):
    engine = make_engine(bundled_model, "both", **settings("none", 0, max_num_seqs=3, max_batch_tokens=16))
    first = choices(5, 1)
    for one in (first, *first.forks):
        one.client = "a"
    engine.add(first)
    engine.add(Request("other", list(PROMPT), SamplingParams(max_tokens=4), client="b"))
    engine.add(Request("further", list(PROMPT), SamplingParams(max_tokens=4), client="b"))
    outputs = outputs_of(engine, until=lambda outputs: any(one.finish_reason for one in outputs))
    assert outputs[-1].request_id in ("other", "further")


def test_all_ranks_fork_alike(engines, models):
    prompt = [7 + i % 29 for i in range(33)]
    one_rank = make_engine(models["dense"], "both", **settings("none", 0))
    expected = alone(one_rank, 5, 0, prompt)
    few_rows = settings("none", 2, max_num_seqs=3) | {"drafter": "ngram"}
    del few_rows["sanitize"]
    with lead_engine(models["dense"], 2, **few_rows) as engine:
        engine.add(choices(5, 0, prompt))
        assert said(outputs_of(engine)) == expected
        assert_all_free(own(engine))
