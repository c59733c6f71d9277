"""Calls are found however the text is cut into pieces, nothing gets lost, and all of it costs little."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.models.answer_parts import CallArguments, CallBegun
from router.models.tools.call_scanner import CallScanner
from router.models.tools.format_names import FORMATS
from router.models.tools.part_writer import MAX_CALLS, MAX_NAME_CHARS
from testing.router.tool_calls import CALLS, SAID, TOOLS, scan

STRAY = [
    " \n",
    "text",
    "<",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "weather",
    '{"name": "clock"',
    ', "arguments": {',
    "(",
    "é",
]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", SAID)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_is_found_does_not_depend_on_the_pieces(name, is_cut, data):
    form = FORMATS[name]
    whole = SAID[name]
    fragment = st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))).map(
        lambda ends: whole[min(ends) : max(ends)]
    )
    mangled = st.tuples(st.integers(0, len(whole)), st.integers(0, 3), st.sampled_from(STRAY)).map(
        lambda change: whole[: change[0]] + change[2] + whole[change[0] + change[1] :]
    )
    parts = st.one_of(st.sampled_from([whole, *form.begins, *form.marks, *STRAY]), fragment, mangled)
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert scan(form, pieces, is_cut=is_cut) == scan(form, [text], is_cut=is_cut)
    assert scan(form, [*text], is_cut=is_cut) == scan(form, [text], is_cut=is_cut)


@pytest.mark.parametrize("name", SAID)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_parts_of_a_call_follow_each_other(name, data):
    """Content never stands between the pieces of one call, so an API may end a call where the next part
    begins."""
    text = "".join(data.draw(st.lists(st.sampled_from([SAID[name], SAID[name][:-7], *STRAY]), max_size=6)))
    scanner = CallScanner(FORMATS[name], TOOLS)
    parts = [part for character in text for part in scanner.push(character)] + scanner.finish()
    open_call = None
    for part in parts:
        if isinstance(part, CallBegun):
            open_call = part.index
        elif isinstance(part, CallArguments):
            assert part.index == open_call
        else:
            open_call = None


@pytest.mark.parametrize(
    "text",
    [
        "no call at all \n",
        '<tool_call>\n{"name": "weather"',
        "Well: \n <tool_call>nonsense</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "\\ud83d"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_nothing_that_can_not_be_read_gets_lost(text):
    assert scan(FORMATS["hermes"], [text]) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}}</tool_call>', "}</tool_call>", [("f", '{"a": 1}')]),
        (
            '{"name": "f", "arguments": {"a": [1}}\n</tool_call> so',
            "}}\n</tool_call> so",
            [("f", '{"a": [1')],
        ),
        ('{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": {"a": 1}}\n</tool', "</tool", [("f", '{"a": 1}')]),
        (
            '{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("f", '{"a": "</tool_call>"}')],
        ),
        (
            '{"name": "f"}{"name": "g"}\n<tool_call>{"name": "h"}</tool_call>',
            "",
            [("f", "{}"), ("g", "{}"), ("h", "{}")],
        ),
    ],
)
def test_a_call_that_has_begun_stays_a_call_and_the_rest_is_content(text, content, calls):
    assert scan(FORMATS["hermes"], [f"<tool_call>{text}"]) == (content, calls)


def test_a_call_too_many_is_left_out_even_where_it_is_cut():
    for name, text in SAID.items():
        for length in range(len(text)):
            _, calls = scan(FORMATS[name], [text[:length]], max_calls=1, is_cut=True)
            assert [called for called, _ in calls] in ([], ["weather"])


def test_a_name_has_a_limit():
    for name, text in SAID.items():
        long = "n" * (MAX_NAME_CHARS + 1)
        content, calls = scan(FORMATS[name], [text.replace("weather", long)])
        assert long in content
        assert all(called != long for called, _ in calls)


def test_behind_the_last_call_that_an_answer_may_have_there_is_content():
    content, calls = scan(FORMATS["hermes"], [SAID["hermes"] * (MAX_CALLS // 2 + 1)])
    assert len(calls) == MAX_CALLS
    assert [(name, json.loads(arguments)) for name, arguments in calls[-2:]] == CALLS
    assert content == SAID["hermes"]


HARD = [" ", "<", "[", '"', "\\", "{", "a", '{"name": "', "[clock(at=", "<tool_call>clock<arg_key>"]


def hold_little(name, end, size, piece):
    """Push a long text. What it makes the scanner keep at hand is copied with each piece, so it must stay
    short."""
    form = FORMATS[name]
    for begin in (
        "",
        *form.begins,
        SAID[name][: SAID[name].index("rich")],
        SAID[name][: SAID[name].index("2]")],
    ):
        scanner = CallScanner(form, TOOLS)
        scanner.push(begin)
        text = end * (piece // len(end) + 1)
        for _ in range(size // len(text)):
            scanner.push(text)
            assert len(scanner._text.rest) <= MAX_NAME_CHARS + len(text)


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("end", [*HARD, "begin"])
def test_no_text_makes_pieces_slow(name, end):
    hold_little(name, end if end != "begin" else (FORMATS[name].begins or ("[",))[0], 20_000, 16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("end", [*HARD, "begin"])
def test_no_long_text_makes_pieces_slow(name, end):
    hold_little(name, end if end != "begin" else (FORMATS[name].begins or ("[",))[0], 1_000_000, 64)


def read_long(name, size):
    """Work that grows with the square of the length would run into the test's time limit."""
    begins = FORMATS[name].begins
    tried = "".join([*begins[:1], *FORMATS[name].marks[:1], "f"])
    for begin in ("", *begins, SAID[name][: SAID[name].index("rich")]):
        for end in (*HARD, *begins, tried, SAID[name], SAID[name][-30:]):
            scan(FORMATS[name], [begin + end * (size // len(end))])


@pytest.mark.parametrize("name", SAID)
def test_a_long_answer_in_one_piece_is_read_at_once(name):
    read_long(name, 10_000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAID)
def test_a_megabyte_in_one_piece_is_read_at_once(name):
    read_long(name, 1_000_000)
