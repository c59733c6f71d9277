"""Each format reads the calls that models write in it, wherever the text is cut."""

import json
from itertools import chain

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from router.models.answer_parts import gathered
from router.models.chat_template import ChatTemplate
from router.models.grammar import literal
from router.models.tools.call_scanner import CallScanner
from router.models.tools.format_names import FORMATS, tool_format
from router.models.tools.tool_format import Marks, Tool, ToolCall
from wire.errors import InvalidRequestError

WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "array", "items": {"type": "integer"}}},
    },
)
CLOCK = Tool("clock", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)
SAID = {
    "hermes": """\
<tool_call>
{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
</tool_call>
<tool_call>
{"name": "clock", "arguments": {}}
</tool_call>""",
    "nemotron_json": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}, '
    '{"name": "clock", "arguments": {}}]</TOOLCALL>',
    "qwen3_coder": """\
<tool_call>
<function=weather>
<parameter=city>
Zürich
</parameter>
<parameter=days>
[1, 2]
</parameter>
</function>
</tool_call>
<tool_call>
<function=clock>
</function>
</tool_call>""",
}
CALLS = [("weather", {"city": "Zürich", "days": [1, 2]}), ("clock", {})]


def scan(form, pieces, **limits):
    """Content and calls, by name and arguments."""
    scanner = CallScanner(form, TOOLS, **limits)
    whole = gathered([*chain.from_iterable(map(scanner.push, pieces)), *scanner.finish()])
    return whole.content, [(call.name, json.loads(call.arguments)) for call in whole.calls]


def lark_of(form, tools, *, may_repeat):
    marks = Marks(literal(form.begin), literal(form.end))
    return "\n".join(["start: calls", *form.rules(tools, marks, may_repeat=may_repeat)])


@pytest.fixture(scope="module")
def tokenizer(bundled_model):
    return LLTokenizer((bundled_model / "tokenizer.json").read_text(), eos_token=[2])


def follows(tokenizer, lark, text):
    matcher = LLMatcher(tokenizer, lark)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", SAID)
def test_a_format_reads_its_calls(name):
    form, text = FORMATS[name], SAID[name]
    assert scan(form, [text]) == ("", CALLS)
    assert scan(form, [f"Let me see.\n\n{text}\n"]) == ("Let me see.", CALLS)
    assert scan(form, [f"{text}\n\nDone."]) == ("Done.", CALLS)
    assert scan(form, [text], max_calls=1) == ("", CALLS[:1])


def cut_off(name, text):
    scanner = CallScanner(FORMATS[name], TOOLS)
    whole = gathered(scanner.push(text) + scanner.cut())
    return whole.content, [(call.name, call.arguments) for call in whole.calls]


@pytest.mark.parametrize("name", SAID)
def test_wherever_an_answer_is_cut_its_content_has_no_marks_and_arguments_grow(name):
    """Those of each call begin the JSON that they are once they are complete."""
    text, before = "Let me see.\n" + SAID[name], []
    whole = [json.dumps(arguments, ensure_ascii=False) for _, arguments in CALLS]
    for length in range(len(text)):
        content, calls = cut_off(name, text[:length])
        assert "Let me see.\n".startswith(content)
        assert [name for name, _ in calls] == [name for name, _ in CALLS[: len(calls)]]
        assert len(calls) >= len(before)
        for arguments, complete, (_, earlier) in zip(calls, whole, before, strict=False):
            assert complete.startswith(arguments[1])
            assert arguments[1].startswith(earlier)
        before = calls
    assert before == [(name, arguments) for (name, _), arguments in zip(CALLS, whole, strict=True)]


@pytest.mark.parametrize(
    ("name", "block", "calls"),
    [
        ("hermes", '{"arguments": {"a": 1}, "na', []),
        ("hermes", '{"arguments": {"a": 1}, "name": "f"', [("f", '{"a": 1}')]),
        ("hermes", '{"name": "f", "arguments": "{\\"a\\": \\"\\u00', [("f", '{"a": "')]),
        ("hermes", '{"name": "f", "arguments": 1', [("f", "")]),
        ("hermes", '{"name": 5, "arguments": {', []),
        ("nemotron_json", '[{"name": "f"}, {"name": "g", "arguments": {"a', [("f", "{}"), ("g", '{"a')]),
        ("qwen3_coder", "<function=weather><parameter=days>\n[1, 2\n</para", [("weather", '{"days": [1, 2')]),
        ("qwen3_coder", "<function=weather>\n</function>\n", [("weather", "{}")]),
        ("qwen3_coder", "<function=wea", []),
    ],
)
def test_of_a_call_that_is_cut_what_is_certain_is_told(name, block, calls):
    assert cut_off(name, FORMATS[name].begin + block) == ("", calls)


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("block", ["nonsense", " no call", "5"])
def test_what_begins_no_call_is_content_where_it_is_cut_too(name, block):
    text = FORMATS[name].begin + block
    assert cut_off(name, text) == (text, [])


def test_a_call_too_many_is_not_told_where_it_is_cut_either():
    scanner = CallScanner(FORMATS["hermes"], TOOLS, max_calls=1)
    whole = gathered(scanner.push(SAID["hermes"][:-5]) + scanner.cut())
    assert [call.name for call in whole.calls] == ["weather"]


@pytest.mark.parametrize("name", SAID)
def test_what_is_enforced_is_what_is_read(name, tokenizer):
    form, text = FORMATS[name], SAID[name]
    assert follows(tokenizer, lark_of(form, TOOLS, may_repeat=True), text)
    assert not follows(tokenizer, lark_of(form, TOOLS, may_repeat=False), text)
    assert not follows(tokenizer, lark_of(form, (CLOCK,), may_repeat=True), text)
    assert not follows(tokenizer, lark_of(form, TOOLS, may_repeat=True), text.replace("[1, 2]", '"1"'))
    assert not follows(tokenizer, lark_of(form, TOOLS, may_repeat=True), f"{text} ")


@pytest.mark.parametrize("name", SAID)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(name, data):
    form = FORMATS[name]
    parts = st.sampled_from(
        [SAID[name], form.begin, form.end, "<tool", " \n", "text", "<", form.begin + "{}"]
    )
    text = "".join(data.draw(st.lists(parts, max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert scan(form, pieces) == scan(form, [text])


@pytest.mark.parametrize(
    "text",
    [
        "no call at all \n",
        '<tool_call>\n{"name": "weather"',
        "Well: \n <tool_call>nonsense</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_nothing_that_can_not_be_read_gets_lost(text):
    assert scan(FORMATS["hermes"], [text]) == (text, [])


def test_arguments_are_objects_however_a_model_writes_them():
    hermes = FORMATS["hermes"]
    for said, arguments in [
        ('"arguments": "{\\"a\\": 1}"', '{"a": 1}'),
        ('"parameters": {"b": "ü"}', '{"b": "ü"}'),
    ]:
        assert hermes.parse(f'{{"name": "f", {said}}}', ()) == [ToolCall("f", arguments)]
    assert hermes.parse('{"name": "f"}', ()) == [ToolCall("f", "{}")]
    coder = FORMATS["qwen3_coder"]
    block = "<function=weather>\n<parameter=city>\n\n 5 \n\n</parameter>\n<parameter=days>\n7 x\n</parameter>"
    (call,) = coder.parse(block, TOOLS)
    assert json.loads(call.arguments) == {"city": "\n 5 \n", "days": "7 x"}


def test_texts_that_qwen3_coder_can_not_enforce_are_refused():
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}})
    with pytest.raises(InvalidRequestError, match="parameter 'a' of tool 'f': pattern can't be enforced"):
        lark_of(FORMATS["qwen3_coder"], [tool], may_repeat=False)


def test_enforced_arguments_follow_their_schema(tokenizer):
    """A schema that refers to itself, in a call of its own."""
    tree = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/tree"}},
                "additionalProperties": False,
            }
        },
    }
    lark = lark_of(FORMATS["hermes"], [Tool('pl"ant', tree)], may_repeat=False)
    arguments = {"left": {"left": {}}}
    jsonschema.validate(arguments, tree)
    call = json.dumps({"name": 'pl"ant', "arguments": arguments})
    assert follows(tokenizer, lark, f"<tool_call>\n{call}\n</tool_call>")
    assert not follows(tokenizer, lark, f"<tool_call>\n{call.replace('left', 'right')}\n</tool_call>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ('{% if tools %}<tool_call>\n{"name": ...}{% endif %}', "hermes"),
        ("{% if tools %}<TOOLCALL>[...]</TOOLCALL>{% endif %}", "nemotron_json"),
        ("<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>", "qwen3_coder"),
    ],
)
def test_a_template_shows_which_format_its_model_writes(template, name):
    found = tool_format("auto", ChatTemplate({"default": template}, {}))
    assert found is (None if name is None else FORMATS[name])
    assert tool_format("none", ChatTemplate({"default": template}, {})) is None
    assert tool_format("hermes", None) is FORMATS["hermes"]
