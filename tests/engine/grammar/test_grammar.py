"""Answers follow their grammars to the end, with drafts, with steps launched ahead and in mixed batches."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.grammar.grammars import Grammars
from engine.request import Request
from testing.engines.speculating import (
    Answer,
    Ask,
    assert_nothing_is_owned,
    assert_same,
    greedy_asks,
    sampled_asks,
    scripted,
    serve,
    texts_of,
)
from wire.errors import GrammarError, InvalidRequestError, ModelLoadError
from wire.messages.sampling_params import MAX_GRAMMAR_BYTES, SamplingParams

jsonschema = pytest.importorskip("jsonschema")

EOS = frozenset([2, 4])
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CODE = "[a-z]{3}-[0-9]{2}"


def grammar_of(schema):
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": " ?"})


@pytest.fixture(scope="module")
def tokenizer(bundled_model):
    return Tokenizer.from_file(str(bundled_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def asks(tokenizer):
    """Grammars of all kinds in one batch with requests that have none."""
    person, code = grammar_of(PERSON), LLMatcher.grammar_from_regex(CODE)

    def ask(text, grammar, **params):
        params = SamplingParams(max_tokens=80, grammar=grammar, **params)
        return Ask(tuple(tokenizer.encode(text).ids), params, seed=5, stop=EOS)

    return [
        ask("Write JSON: ", person, temperature=0),
        ask("Write JSON: ", person, temperature=1.0),
        ask("x", person, temperature=0, repetition_penalty=1.2, speculate=False),
        ask("The code is ", code, temperature=0.8, top_p=0.9),
        ask("The code is ", code, temperature=0, logprobs=2),
        ask("The code is ", code, temperature=0, min_tokens=20),
        *greedy_asks(3, seed=1),
        *sampled_asks(3, seed=1),
    ]


def assert_followed(answers, tokenizer):
    for answer in answers:
        grammar, text = answer.request.params.grammar, tokenizer.decode(answer.tokens)
        if grammar is not None:
            assert answer.finish_reason == "stop"
            if "maxLength" in grammar:
                jsonschema.validate(json.loads(text), PERSON)
            else:
                assert re.fullmatch(CODE, text)


@pytest.mark.parametrize(
    ("mode", "k", "drafter", "ahead"),
    [
        ("all", 3, "ngram", 0),
        ("none", 2, "mtp", 1),
        pytest.param("align", 0, None, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_constrained_answers_are_the_same_with_drafts_and_ahead(
    engines, bundled_model, tokenizer, asks, mode, k, drafter, ahead
):
    expected = engines.plain(bundled_model, asks)
    assert_followed(expected, tokenizer)
    engine = engines.get(bundled_model, mode, k, drafter, ahead)
    assert_same(serve(engine, asks, per_step=2), expected)
    assert_nothing_is_owned(engine)
    assert not engine._following
    assert (engine._runner._masks.table == -1).all()


@pytest.mark.parametrize("style", ["right", "wrong", "mixed"])
def test_drafts_that_the_grammar_forbids_are_rejected_and_others_kept(engines, bundled_model, asks, style):
    expected = engines.plain(bundled_model, asks)
    engine = engines.get(bundled_model, "none", 3, "ngram", 0)
    with scripted(engine, texts_of(asks, expected), style):
        assert_same(serve(engine, asks), expected)


def test_a_row_with_a_grammar_changes_no_other_row(engines, bundled_model, asks):
    engine = engines.get(bundled_model, "none", 0, None, 0)
    free = [ask for ask in asks if ask.params.grammar is None]
    together = [
        answer for answer in engines.plain(bundled_model, asks) if answer.request.params.grammar is None
    ]
    assert_same(serve(engine, free), together)


def test_an_answer_goes_on_behind_what_another_server_generated(engines, bundled_model, asks):
    """Its matcher has followed the tokens so far when the answer continues."""
    expected = engines.plain(bundled_model, asks)
    engine = engines.get(bundled_model, "all", 3, "ngram", 0)
    for number in (1, 9):
        for i, (ask, whole) in enumerate(zip(asks[:4], expected, strict=False)):
            number_said = min(number, len(whole.tokens) - 1)
            said = whole.tokens[:number_said]
            request = Request(
                f"resumed-{i}-{number}",
                [*ask.prompt, *said],
                ask.params,
                stop_token_ids=ask.stop,
                seed=ask.seed,
                num_answered=len(said),
            )
            rest = Answer(request)
            engine.add(request)
            while rest.finish_reason is None:
                for output in engine.step().outputs:
                    rest.add(output)
            assert [*said, *rest.tokens] == whole.tokens


def test_preempted_rows_go_on_in_their_grammars(engines, bundled_model, tokenizer, asks):
    asks = [replace(ask, prompt=ask.prompt + (50 + i,) * 20) for i, ask in enumerate(asks[:2] * 4)]
    expected = engines.plain(bundled_model, asks)
    engine = engines.get(
        bundled_model, "none", 0, None, 0, max_num_seqs=8, max_model_len=160, cache_memory_bytes=1_400_000
    )
    before = engine.scheduler.num_preemptions
    assert_same(serve(engine, asks), expected)
    assert engine.scheduler.num_preemptions > before


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": 0, "maximum": 99},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 6},
            {"enum": ["red", "green", 3, None]},
            {"const": {"a": [1]}},
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "number", "multipleOf": 0.5, "minimum": -2, "maximum": 2},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2)
        ),
        st.builds(
            lambda fields, num: {
                "type": "object",
                "properties": fields,
                "required": list(fields)[:num],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["x", "y z", "ä", '"']), inner, max_size=3),
            st.integers(0, 3),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(schemas=st.lists(SCHEMAS, min_size=4, max_size=8))
def test_answers_validate_against_their_schemas(engines, bundled_model, tokenizer, schemas):
    engine = engines.get(bundled_model, "none", 3, "ngram", 0)
    asks = [
        Ask(
            (60 + i, 70),
            SamplingParams(max_tokens=120, temperature=i % 2, grammar=grammar_of(schema)),
            seed=i,
            stop=EOS,
        )
        for i, schema in enumerate(schemas)
    ]
    for answer, schema in zip(serve(engine, asks), schemas, strict=True):
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(tokenizer.decode(answer.tokens)), schema)
        else:
            assert len(answer.tokens) == 120


def test_one_grammar_that_can_not_be_followed_on_ends_its_request_alone(engines, bundled_model, asks):
    engine = engines.get(bundled_model, "none", 0, None, 0)
    asks = [asks[0], replace(asks[1], seed=77), *asks[6:8]]
    expected = engines.plain(bundled_model, asks)

    def break_one(answers):
        follower = answers[1].request.follower
        if len(answers[1].tokens) == 4 and follower.answer[-1] != 300:
            follower.answer += [300, 300]  # forbidden: the next masks won't come, as behind a limit

    answers = serve(engine, asks, on_step=break_one)
    assert [answer.finish_reason for answer in answers[:2]] == ["stop", "error"]
    assert_same([answers[0], *answers[2:]], [expected[0], *expected[2:]])
    assert_nothing_is_owned(engine)


def test_bad_grammars_are_refused_with_the_librarys_words(engines, bundled_model):
    engine = engines.get(bundled_model, "none", 0, None, 0)
    for grammar, words in [
        (grammar_of({"type": "strin"}), "Invalid type: strin"),
        ("start: <unheard_of>", "unknown special token"),
        ("nonsense", "can't be compiled"),
    ]:
        with pytest.raises(GrammarError, match=words):
            engine.add(Request("r", [5, 6], SamplingParams(max_tokens=4, grammar=grammar)))
    with pytest.raises(GrammarError, match=r"can't be followed: .* fails parse$"):
        engine.grammars.follow('start: "a"', [300]).opened.result(10)
    with pytest.raises(InvalidRequestError, match="grammar"):
        SamplingParams(max_tokens=4, grammar="x" * (MAX_GRAMMAR_BYTES + 1))
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        SamplingParams(max_tokens=4, grammar='start: "a"', ignore_eos=True)


def test_a_model_folder_without_a_tokenizer_serves_all_but_grammars(bundled_model, tmp_path):
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(bundled_model / name, tmp_path / name)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Grammars(tmp_path, 1024, [2]).follow('start: "a"').opened.result(10)
    with pytest.raises(ModelLoadError, match="end-of-sequence token"):
        Grammars(bundled_model, 1024, []).follow('start: "a"').opened.result(10)
