"""Each format reads the calls that models write in it, and enforces what it reads."""

import json

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from router.models.answer_parts import CallArguments, CallBegun
from router.models.chat_template import ChatTemplate
from router.models.grammar import literal
from router.models.tools.call_scanner import CallScanner
from router.models.tools.format_names import FORMATS, tool_format
from router.models.tools.tool_format import Tool
from testing.router.tool_calls import CALLS, CLOCK, SAID, TOOLS, read, scan
from wire.errors import InvalidRequestError

JSON = ["hermes", "nemotron_json", "minimax", "granite", "mistral", "llama3_json"]


def lark_of(form, tools, *, may_repeat):
    begin = [f"begin: {literal(mark)}" for mark in form.begins[:1]]
    return "\n".join(["start: calls", *begin, *form.rules(tools, literal, may_repeat=may_repeat)])


@pytest.fixture(scope="module")
def tokenizer(bundled_model):
    return LLTokenizer((bundled_model / "tokenizer.json").read_text(), eos_token=[2])


def follows(tokenizer, lark, text):
    matcher = LLMatcher(tokenizer, lark)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_every_format_has_an_example():
    assert {id(form) for form in FORMATS.values()} == {id(FORMATS[name]) for name in SAID}


@pytest.mark.parametrize("name", SAID)
def test_a_format_reads_its_calls(name):
    form, text = FORMATS[name], SAID[name]
    assert read(form, text) == ("", CALLS)
    assert read(form, f" \n{text}\n\nDone.") == ("Done.", CALLS)
    assert read(form, text, max_calls=1) == ("", CALLS[:1])
    if form.begins:
        assert read(form, f"Let me see.\n\n{text}\n") == ("Let me see.", CALLS)
        assert read(form, f"{text} And \n{text}") == ("And", CALLS * 2)
    else:
        assert scan(form, [f"Let me see.\n{text}"]) == (f"Let me see.\n{text}", [])


@pytest.mark.parametrize("name", SAID)
def test_wherever_an_answer_is_cut_its_content_has_no_marks_and_arguments_grow(name):
    """Those of each call begin the JSON that they are once they are complete."""
    text, before = SAID[name], []
    _, whole = scan(FORMATS[name], [text])
    for length in range(len(text) + 1):
        content, calls = scan(FORMATS[name], [text[:length]], is_cut=True)
        assert content == ""
        assert len(calls) >= len(before)
        for (called, arguments), complete, (_, earlier) in zip(calls, whole, before, strict=False):
            assert called == complete[0]
            assert complete[1].startswith(arguments)
            assert arguments.startswith(earlier)
        before = calls
    assert before == whole


@pytest.mark.parametrize("name", JSON)
def test_arguments_in_json_stay_as_they_are_written(name):
    said = '{"city" : "Z\\u00fcrich \\"{[" ,"days":[ 1,2 ]}'
    text = SAID[name].replace('{"city": "Zürich", "days": [1, 2]}', said)
    assert scan(FORMATS[name], [text])[1][0] == ("weather", said)


@pytest.mark.parametrize("name", SAID)
def test_texts_arrive_while_they_are_written(name):
    scanner = CallScanner(FORMATS[name], TOOLS)
    told = scanner.push(SAID[name].partition("rich")[0])
    assert isinstance(told[0], CallBegun)
    assert "".join(part.text for part in told[1:]) == '{"city": "Zü'
    assert scanner.push("r") == [CallArguments(0, "r")]


@pytest.mark.parametrize(
    ("name", "block", "calls"),
    [
        ("hermes", '{"arguments": {"a": 1}, "na', []),
        ("hermes", '{"arguments": {"a": 1}, "name": "f"', [("f", '{"a": 1}')]),
        ("hermes", '{"name": "f", "arg', []),
        ("hermes", '{"name": "f", "arguments": {"a": "\\', [("f", '{"a": "\\')]),
        ("hermes", '{"name": "f", "arguments": "{\\"a\\": \\"\\u00', []),
        ("nemotron_json", '[{"name": "f"}, {"name": "g", "arguments": {"a', [("f", "{}"), ("g", '{"a')]),
        ("qwen3_coder", "<function=weather><parameter=days>\n[1, 2\n</para", [("weather", "{")]),
        ("qwen3_coder", "<function=weather><parameter=city>\nsky\n</para", [("weather", '{"city": "sky')]),
        ("qwen3_coder", "<function=weather>\n</function>\n", [("weather", "{}")]),
        ("qwen3_coder", "<function=wea", []),
    ],
)
def test_of_a_call_that_is_cut_what_is_certain_is_told(name, block, calls):
    assert scan(FORMATS[name], [FORMATS[name].begins[0] + block], is_cut=True) == ("", calls)


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("block", ["{nonsense} a", "no call: {", "[5] a", "<a <arg_key>", ""])
def test_a_block_that_is_no_call_is_content(name, block):
    form = FORMATS[name]
    text = f"Well: \n {''.join(form.begins[:1])}{block}{''.join(form.marks[-1:])}"
    assert scan(form, [text]) == (text, [])
    assert scan(form, [f"{text} {SAID[name]}"])[0].startswith(text)


@pytest.mark.parametrize("name", SAID)
def test_what_is_enforced_is_what_is_read(name, tokenizer):
    form, text = FORMATS[name], SAID[name]
    assert follows(tokenizer, lark_of(form, TOOLS, may_repeat=True), text)
    assert not follows(tokenizer, lark_of(form, TOOLS, may_repeat=False), text)
    assert not follows(tokenizer, lark_of(form, (CLOCK,), may_repeat=True), text)
    assert not follows(tokenizer, lark_of(form, TOOLS, may_repeat=True), text.replace("[1, 2]", '"1"'))
    assert not follows(tokenizer, lark_of(form, TOOLS, may_repeat=True), f"{text} ")


@pytest.mark.parametrize("name", SAID)
def test_a_schema_that_names_no_parameters_allows_any(name, tokenizer):
    free = [Tool(tool.name, {"type": "object"}) for tool in TOOLS]
    assert follows(tokenizer, lark_of(FORMATS[name], free, may_repeat=True), SAID[name])


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        (
            '[TOOL_CALLS]weather[ARGS]{"days": [2]}[TOOL_CALLS]clock[ARGS]{}',
            [("weather", {"days": [2]}), CALLS[1]],
        ),
        ('[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{"days": [2]}', [("weather", {"days": [2]})]),
        ('[TOOL_CALLS]weather{"days": [2]}', [("weather", {"days": [2]})]),
    ],
)
def test_newer_models_of_mistral_write_names_between_marks(said, calls):
    assert read(FORMATS["mistral"], said) == ("", calls)


def test_ids_are_those_that_the_templates_take():
    def ids(name, text):
        parts = CallScanner(FORMATS[name], TOOLS).push(text)
        return [part.id for part in parts if isinstance(part, CallBegun)]

    assert ids("kimi_k2", SAID["kimi_k2"]) == ["functions.weather:0", "functions.clock:1"]
    again = ids("kimi_k2", SAID["kimi_k2"] * 2)
    assert len(set(again)) == 4
    for text in (SAID["mistral"], "[TOOL_CALLS]weather[ARGS]{}[TOOL_CALLS]clock[CALL_ID]x[ARGS]{}"):
        assert all(len(one) == 9 and one.isalnum() for one in ids("mistral", text))
    assert ids("mistral", "[TOOL_CALLS]clock[CALL_ID]abcdefgh1[ARGS]{}") == ["abcdefgh1"]
    assert all(one.startswith("call_") for one in ids("hermes", SAID["hermes"]))


def test_arguments_are_objects_however_a_model_writes_them():
    for said, arguments in [
        ('"arguments": "{\\"a\\": 1}"', '{"a": 1}'),
        ('"arguments": ""', "{}"),
        ('"arguments": null', "{}"),
        ('"parameters": {"b": "ü"}', '{"b": "ü"}'),
        ('"arguments": {}, "id": "x"', "{}"),
    ]:
        text = f'<tool_call>{{"name": "f", {said}}}</tool_call>'
        assert scan(FORMATS["hermes"], [text]) == ("", [("f", arguments)])
    assert scan(FORMATS["hermes"], ['<tool_call>{"name": "f"}</tool_call>']) == ("", [("f", "{}")])


TYPED = Tool(
    "f",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "on": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
        },
    },
)


@pytest.mark.parametrize(
    ("key", "said", "value"),
    [
        ("text", "\n 5 \n", "\n 5 \n"),
        ("text", 'a "b" \\ </x', 'a "b" \\ </x'),
        ("unknown", "5", "5"),
        ("count", " 5 ", 5),
        ("count", "5 x", "5 x"),
        ("on", "True", True),
        ("maybe", "5", "5"),
        ("maybe", '"5"', "5"),
        ("maybe", "None", None),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "NaN", "NaN"),
        ("any", "[" * 100_000, "[" * 100_000),
    ],
)
def test_values_between_tags_have_the_types_of_their_schemas(key, said, value):
    for name, text in [
        (
            "qwen3_coder",
            f"<tool_call>\n<function=f>\n<parameter={key}>\n{said}\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm45", f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{said}</arg_value>\n</tool_call>"),
        (
            "minimax_m2",
            f'<minimax:tool_call><invoke name="f"><parameter name="{key}">{said}</parameter></invoke>'
            "</minimax:tool_call>",
        ),
    ]:
        assert read(FORMATS[name], text, tools=[TYPED]) == ("", [("f", {key: value})])


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n<parameter=count>\n5\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>",
        "<function=f>\n<parameter=count>\n5\n</parameter>\n<parameter=text>\nx\n</function>\n</tool_call>",
        "<function=f>\n<parameter=count>5</parameter>\n<parameter=text>x</parameter>\n</tool_call>",
    ],
)
def test_qwen3_coder_may_forget_an_end(text):
    assert read(FORMATS["qwen3_coder"], f"<tool_call>\n{text}", tools=[TYPED]) == (
        "",
        [("f", {"count": 5, "text": "x"})],
    )


def test_what_stands_between_parameters_is_content_behind_the_call():
    text = SAID["qwen3_coder"].replace("<parameter=days>", "so: <parameter=days>")
    assert read(FORMATS["qwen3_coder"], text) == ("so:", CALLS)


def test_texts_that_tags_can_not_enforce_are_refused():
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}})
    for name in ("qwen3_coder", "glm45", "minimax_m2"):
        with pytest.raises(InvalidRequestError, match="parameter 'a' of tool 'f': pattern can't be enforced"):
            lark_of(FORMATS[name], [tool], may_repeat=False)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
def test_an_enforced_text_may_have_any_character(name, tokenizer):
    lark = lark_of(FORMATS[name], TOOLS, may_repeat=True)
    text = SAID[name].replace("Zürich", 'if a < b:\n  "</p>"\n')
    assert follows(tokenizer, lark, text)
    assert read(FORMATS[name], text)[1][0][1]["city"] == 'if a < b:\n  "</p>"\n'


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("'a \"b\" \\' \\n\\x41\\u00fc\\U0001F600\\d'", 'a "b" \' \nAü😀\\d'),
        ('"""two\n"lines\\""""', 'two\n"lines"'),
        ('""', ""),
        ("-1.5e3", -1500.0),
        (
            "[True, None, false, {'a': (1, 2,), \"b\": {}}, [ ], ]",
            [True, None, False, {"a": [1, 2], "b": {}}, []],
        ),
    ],
)
def test_values_in_python_become_json(said, value):
    text = f"[clock(at = {said} , on=1)]"
    assert read(FORMATS["pythonic"], text) == ("", [("clock", {"at": value, "on": 1})])


@pytest.mark.parametrize("said", ["x", "1_000", "[1 2]", "'\\uzzzz'", "'\\U00ffffff'", "f(1)", "[" * 100])
def test_a_value_that_is_none_ends_the_arguments(said):
    content, calls = scan(FORMATS["pythonic"], [f"[clock(at={said})]"])
    assert content != ""
    assert calls[0][0] == "clock"


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[a](b)", "[other(a=1)]", "[weather(5)]", '{"name": "other", "parameters": {}}']
)
@pytest.mark.parametrize("name", ["pythonic", "llama3_json"])
def test_without_marks_only_the_name_of_a_tool_makes_a_call(name, text):
    assert scan(FORMATS[name], [text]) == (text, [])


def test_marks_of_a_template_may_stand_before_calls_without_marks():
    assert read(FORMATS["llama3_json"], f"<|python_tag|>{SAID['llama3_json']}") == ("", CALLS)
    assert read(FORMATS["pythonic"], f"<|python_start|>{SAID['pythonic']}<|python_end|>") == ("", CALLS)


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


def test_optional_arguments_may_be_left_out(tokenizer):
    tool = Tool(
        "f",
        {"type": "object", "properties": {key: {"type": "integer"} for key in "abc"}, "required": ["b"]},
    )
    lark = lark_of(FORMATS["pythonic"], [tool], may_repeat=False)
    for text in ("[f(b=1)]", "[f(a=1, b=2)]", "[f(b=2, c=3)]", "[f(a=1, b=2, c=3)]"):
        assert follows(tokenizer, lark, text)
    for text in ("[f()]", "[f(a=1)]", "[f(, b=1)]", "[f(b=1, )]", "[f(b=1 c=2)]"):
        assert not follows(tokenizer, lark, text)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ('{% if tools %}<tool_call>\n{"name": ...}{% endif %}', "hermes"),
        ("{% if tools %}<TOOLCALL>[...]</TOOLCALL>{% endif %}", "nemotron_json"),
        ("<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>", "qwen3_coder"),
        ("]<]minimax[>[<tool_call>]<]minimax[>[<invoke>", None),
        ("You SHOULD NOT: [func_name1(params_name1=params_value1, params_name2=...)]", "pythonic"),
    ],
)
def test_a_template_shows_which_format_its_model_writes(template, name):
    found = tool_format("auto", ChatTemplate({"default": template}, {}))
    assert found is (None if name is None else FORMATS[name])
    assert tool_format("none", ChatTemplate({"default": template}, {})) is None
    assert tool_format("hermes", None) is FORMATS["hermes"]
