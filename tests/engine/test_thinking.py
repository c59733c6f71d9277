"""Answers that think: budgets end the thinking exactly, and grammars begin behind it."""

import json
from dataclasses import replace

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.request import Request
from testing.engines.speculating import (
    Answer,
    Ask,
    assert_nothing_is_owned,
    assert_same,
    greedy_asks,
    scripted,
    serve,
    texts_of,
)
from wire.messages.sampling_params import SamplingParams, Thinking

jsonschema = pytest.importorskip("jsonschema")

EOS = frozenset([2, 4])
BUDGETS = (0, 1, 17)
BEGIN, END = (300,), (301, 302, 303)
"""Tokens that the model does not write by itself."""
NUM_TOKENS = 40
PLAIN = ("none", 0, None, 0)
SAMPLED = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
    "penalised": {"temperature": 0, "frequency_penalty": 0.5, "logprobs": 2},
    "stopping": {"temperature": 1.1, "min_tokens": 4},
}


def ask_with(ask, thinking, **params):
    return replace(ask, params=replace(ask.params, thinking=thinking, **params))


@pytest.fixture(scope="module")
def free_asks():
    """Requests without a budget."""
    return [
        Ask(
            tuple(40 + (i * j) % 23 for j in range(8 + i)),
            SamplingParams(max_tokens=NUM_TOKENS, **params),
            seed=i,
        )
        for i, params in enumerate(SAMPLED.values())
    ]


@pytest.fixture(scope="module")
def asks(engines, bundled_model, free_asks):
    """Requests with budgets, of which the model ends some by itself, and in part."""
    found = []
    for ask, answer in zip(free_asks, engines.plain(bundled_model, free_asks), strict=True):
        text = answer.tokens
        for budget in BUDGETS:
            found += [
                ask_with(ask, Thinking(BEGIN, END, is_open=True, budget=budget)),
                ask_with(ask, Thinking(BEGIN, END, is_open=False, budget=budget)),
                ask_with(ask, Thinking(tuple(text[:2]), END, is_open=False, budget=budget)),
                ask_with(ask, Thinking(BEGIN, tuple(text[9:11]), is_open=True, budget=budget)),
            ]
            if budget:
                begun = (text[budget - 1], *END)  # the model has begun the mark where the budget ends
                found.append(ask_with(ask, Thinking(BEGIN, begun, is_open=True, budget=budget)))
    return found


def go_on(engine, request):
    """The rest of an answer of which the request has the first part."""
    rest = Answer(request)
    engine.add(request)
    while rest.finish_reason is None:
        for output in engine.step().outputs:
            rest.add(output)
    return rest


def answer_behind(engine, ask, answered):
    """The rest of an answer that goes on behind ``answered``, without a budget."""
    request = Request(
        "behind",
        [*ask.prompt, *answered],
        replace(ask.params, thinking=None),
        stop_token_ids=ask.stop,
        seed=ask.seed,
        num_answered=len(answered),
    )
    return go_on(engine, request).tokens


def test_a_budget_changes_only_where_the_thinking_ends(engines, bundled_model, free_asks, asks):
    """The oracle knows no budget: up to the end the tokens are those of the request without one, and behind
    the end those of a request that was given everything before."""
    engine = engines.get(bundled_model, *PLAIN)
    free = {
        (ask.prompt, ask.seed): answer.tokens
        for ask, answer in zip(free_asks, engines.plain(bundled_model, free_asks), strict=True)
    }
    num_forced = 0
    for ask, answer in zip(asks, engines.plain(bundled_model, asks), strict=True):
        thinking, text = ask.params.thinking, free[ask.prompt, ask.seed]
        begin, end = list(thinking.begin_token_ids), list(thinking.end_token_ids)
        first = 0 if thinking.is_open else len(begin)
        if not thinking.is_open and text[:first] != begin:
            assert answer.tokens == text
            continue
        last = first + thinking.budget
        if any(text[i : i + len(end)] == end for i in range(first, last)):
            assert answer.tokens == text
            continue
        num_begun = max(
            n for n in range(len(end)) if n <= thinking.budget and text[last - n : last] == end[:n]
        )
        said = [*text[:last], *end[num_begun:]]
        assert answer.tokens == said + answer_behind(engine, ask, said)
        num_forced += 1
    assert num_forced >= len(asks) / 2


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize(("k", "drafter"), [(0, None), (3, "ngram"), (3, "mtp"), (5, "mtp")])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.exhaustive
def test_budgets_give_the_same_tokens_everywhere(engines, bundled_model, asks, mode, k, drafter, concurrency):
    expected = engines.plain(bundled_model, asks)
    for ahead in (0, 1):
        engine = engines.get(bundled_model, mode, k, drafter, ahead)
        assert_same(serve(engine, asks, concurrency), expected)


@pytest.mark.parametrize(("mode", "k", "drafter", "ahead"), [("all", 3, "ngram", 0), ("align", 3, "mtp", 1)])
def test_budgets_give_the_same_tokens_with_drafts_and_ahead(
    engines, bundled_model, asks, mode, k, drafter, ahead
):
    expected = engines.plain(bundled_model, asks)
    engine = engines.get(bundled_model, mode, k, drafter, ahead)
    others = greedy_asks(3, seed=1)
    answers = serve(engine, [*asks, *others], 8, per_step=2)
    assert_same(answers, [*expected, *engines.plain(bundled_model, others)])
    assert_nothing_is_owned(engine)
    assert not any(table.any() for table in engine._runner._budgets.fields.device.values())


@pytest.mark.parametrize("style", ["right", "wrong", "mixed"])
def test_forced_tokens_are_accepted_as_drafts_and_reject_others(engines, bundled_model, asks, style):
    expected = engines.plain(bundled_model, asks)
    engine = engines.get(bundled_model, "none", 3, "ngram", 0)
    with scripted(engine, texts_of(asks, expected), style):
        assert_same(serve(engine, asks), expected)


def test_a_request_alone_has_the_tokens_that_it_has_in_a_batch(engines, bundled_model, asks):
    some = asks[:: len(asks) // 4]
    engine = engines.get(bundled_model, *PLAIN)
    assert_same(serve(engine, some, 1), engines.plain(bundled_model, some))


def test_preempted_answers_keep_their_budgets(engines, bundled_model, asks):
    asks = [replace(ask, prompt=ask.prompt + (50 + i,) * 40) for i, ask in enumerate(asks[:8])]
    expected = engines.plain(bundled_model, asks)
    engine = engines.get(
        bundled_model, "none", 3, "ngram", 0, max_num_seqs=8, max_model_len=160, cache_memory_bytes=4_050_000
    )
    before = engine.scheduler.num_preemptions
    assert_same(serve(engine, asks), expected)
    assert engine.scheduler.num_preemptions > before


# --- grammars behind the thinking ---------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(PERSON), overrides={"whitespace_pattern": " ?"})


@pytest.fixture(scope="module")
def tokenizer(bundled_model):
    return Tokenizer.from_file(str(bundled_model / "tokenizer.json"))


def constrained(tokenizer, count, thinking, **params):
    prompt = tuple(tokenizer.encode("Write JSON: ").ids)
    params = SamplingParams(max_tokens=100, grammar=GRAMMAR, thinking=thinking, **params)
    return [Ask((*prompt, 60 + i), params, seed=i, stop=EOS) for i in range(count)]


def assert_valid_behind(tokenizer, answer, first, end):
    """The answer from ``first`` on has ``end``, and behind its first occurrence nothing but valid JSON."""
    tokens = answer.tokens
    last = next(i for i in range(first, len(tokens)) if tuple(tokens[i : i + len(end)]) == end) + len(end)
    assert not EOS & set(tokens[first:last])
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(tokenizer.decode(tokens[last:])), PERSON)


def test_json_behind_open_thinking_is_valid_in_fifty_draws(engines, bundled_model, tokenizer):
    """An end of sequence can't cut the thinking short, although it is made likely."""
    bias = tuple((token_id, 8.0) for token_id in EOS)
    asks = [
        replace(ask, params=replace(ask.params, thinking=Thinking(BEGIN, END, is_open=True, budget=i % 20)))
        for i, ask in enumerate(constrained(tokenizer, 50, None, temperature=1.0, logit_bias=bias))
    ]
    for answer in serve(engines.get(bundled_model, "none", 3, "ngram", 1), asks):
        assert_valid_behind(tokenizer, answer, 0, END)
        assert tuple(answer.tokens[answer.request.params.thinking.budget :][:3]) == END


def test_an_answer_thinks_or_begins_with_its_grammar_at_once(engines, bundled_model, tokenizer):
    """The first mask is the grammar's and the mark's first token, which a bias makes certain or impossible."""
    thinking = Thinking((300, 304), END, is_open=False, budget=6)
    asks = [
        replace(
            ask,
            params=replace(ask.params, logit_bias=((300, 50.0 - 100.0 * (i % 2)),), temperature=i % 3 / 2),
        )
        for i, ask in enumerate(constrained(tokenizer, 8, thinking))
    ]
    answers = engines.plain(bundled_model, asks)
    assert [answer.tokens[0] == 300 for answer in answers] == [True, False] * 4
    for answer in answers:
        if answer.tokens[0] == 300:
            assert answer.tokens[1] == 304
            assert_valid_behind(tokenizer, answer, 2, END)
        else:
            jsonschema.validate(json.loads(tokenizer.decode(answer.tokens)), PERSON)
    for engine in (
        engines.get(bundled_model, "all", 3, "ngram", 0),
        engines.get(bundled_model, "none", 2, "mtp", 1),
    ):
        assert_same(serve(engine, asks, per_step=3), answers)
        assert_nothing_is_owned(engine)
        assert (engine._runner._masks.table == -1).all()


@pytest.mark.parametrize("style", ["right", "mixed"])
def test_drafts_that_span_the_end_are_kept_if_they_are_right(engines, bundled_model, tokenizer, style):
    """Without a budget too: then the model's own tokens are the end mark."""
    asks = constrained(tokenizer, 3, Thinking(BEGIN, END, is_open=True, budget=7), temperature=0)
    free = [replace(ask, params=replace(ask.params, thinking=None, grammar=None)) for ask in asks]
    for ask, answer in zip(list(asks), engines.plain(bundled_model, free), strict=True):
        asks.append(ask_with(ask, Thinking(BEGIN, tuple(answer.tokens[6:8]), is_open=True)))
    expected = engines.plain(bundled_model, asks)
    for ask, answer in zip(asks, expected, strict=True):
        assert_valid_behind(tokenizer, answer, 0, ask.params.thinking.end_token_ids)
    engine = engines.get(bundled_model, "none", 3, "ngram", 0)
    with scripted(engine, texts_of(asks, expected), style):
        answers = serve(engine, asks)
    assert_same(answers, expected)
    if style == "right":
        for answer in answers:
            assert answer.num_outputs <= 2 + len(answer.tokens) // 4, (
                "no draft was lost where a grammar begins"
            )


def test_a_constrained_answer_goes_on_behind_any_of_its_tokens(engines, bundled_model, tokenizer):
    """On another server: within the begin mark, the thinking, the end mark and the grammar."""
    thinking = Thinking((300, 304), END, is_open=False, budget=4)
    (ask,) = constrained(tokenizer, 1, thinking, temperature=0.8, logit_bias=((300, 50.0),))
    (whole,) = engines.plain(bundled_model, [ask])
    assert_valid_behind(tokenizer, whole, 2, END)
    engine = engines.get(bundled_model, "all", 3, "ngram", 0)
    for number in (1, 2, 4, 6, 7, 9, 12):
        request = Request(
            f"resumed-{number}",
            [*ask.prompt, *whole.tokens[:number]],
            ask.params,
            stop_token_ids=ask.stop,
            seed=ask.seed,
            num_answered=number,
        )
        rest = go_on(engine, request)
        assert rest.tokens == whole.tokens[number:], number


def test_max_tokens_cuts_thinking_that_never_ends(engines, bundled_model, tokenizer):
    (ask,) = constrained(tokenizer, 1, Thinking(BEGIN, END, is_open=True), temperature=0)
    (answer,) = serve(engines.get(bundled_model, *PLAIN), [ask])
    assert answer.finish_reason == "length"
    assert len(answer.tokens) == 100
    assert not EOS & set(answer.tokens)
