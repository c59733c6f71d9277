"""The form that a request asks for is sent to the decode server as a grammar of exactly that form."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from testing.router.scripted_servers import saying

EOS = 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def follows(bundled_model):
    """Whether a grammar accepts a text, and whether the answer may end after this text."""
    text = (bundled_model / "tokenizer.json").read_text()
    tokenizer = LLTokenizer(text, eos_token=[EOS])

    def check(grammar, said):
        matcher = LLMatcher(tokenizer, grammar)
        tokens = tokenizer.tokenize_str(said)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


def response_format(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}}


CASES = [
    (response_format(SCHEMA), ['{"a":1}', '{\n    "a" : 12}'], ['{"a":"1"}', "[]", "", '{"a":1} ']),
    (response_format(SCHEMA, strict=True), ['{"a":1}'], ['{"a": ' + " " * 30 + "1}"]),
    ({"response_format": {"type": "json_object"}}, ["{}", '{"b": [1, "ü"]}'], ["[]", "1"]),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, ['{"a":1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, ["yes", 'n"o'], ["yesyes"]),
    ({"guided_json": json.dumps(SCHEMA)}, ['{"a":1}'], ["{}"]),
    ({"guided_regex": "[a-c]{2}/d"}, ["ab/d"], ["ab"]),
    ({"guided_choice": ["one", "two"]}, ["one", "two"], ["three"]),
    ({"guided_grammar": 'root ::= "a" | "b"'}, ["a", "b"], ["c"]),
    ({"guided_grammar": 'start: "a" n\nn: /[0-9]+/'}, ["a12"], ["a"]),
]


async def test_every_form_becomes_a_grammar_of_just_the_right_answers(make_stack, follows):
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = saying([300])
    for fields, good, bad in CASES:
        for ask in (stack.complete, stack.chat):
            response = await ask(n=2, **fields)
            assert response.status_code == 200, (fields, response.text)
            first, second = (submit.params.grammar for submit in decode.submitted[-2:])
            assert first == second
            assert all(follows(first, text) for text in good), (fields, good)
            assert not any(follows(first, text) for text in bad), (fields, bad)
    await stack.complete(response_format={"type": "text"}, structured_outputs={})
    assert decode.submitted[-1].params.grammar is None


async def test_a_schema_that_the_library_panics_on_is_refused(make_stack):
    """The library cuts a quoted name in its message after 100 bytes, which may be inside a character."""
    stack = await make_stack()
    for padding in range(4):
        schema = {"type": "string", "format": {"const": "a" * (86 + padding) + "😀😀"}}
        assert (await stack.chat(**response_format(schema))).status_code == 400
    assert not stack.decode[0].submitted


async def test_a_refused_schema_reaches_no_server(make_stack):
    stack = await make_stack()
    response = await stack.chat(**response_format({"type": "array", "uniqueItems": True}))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_grammar")
    assert "uniqueItems" in error["message"]
    assert not stack.decode[0].submitted
    assert not any(prefill.requests for prefill in stack.prefill)
