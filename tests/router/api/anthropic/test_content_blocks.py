"""The events of a stream, put together as a client does it, are the blocks of the whole answer."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.anthropic.content_blocks import SIGNATURE, BlockEvents, whole_blocks
from router.models.answer_parts import CallArguments, CallBegun, Content, Reasoning
from testing.router.message_events import put_together

THINKS_AND_CALLS = [
    Reasoning("Let me see. Rome, 3 days…"),
    Content("I book it.\n"),
    CallBegun(0, "call_1", "book_trip"),
    CallArguments(0, '{"city": "Röm", "days": [1, 2, 3], "hotel": null}'),
    CallBegun(1, "call_2", "no_arguments"),
    CallBegun(2, "call_3", "look"),
    CallArguments(2, "{}"),
    Content("Done."),
    Reasoning("Did I forget something?"),
]


def cut(part, at):
    """Returns one or two parts that mean the same as ``part``."""
    match part:
        case Reasoning(text) | Content(text):
            return [type(part)(piece) for piece in (text[:at], text[at:]) if piece]
        case CallArguments(index, text):
            return [CallArguments(index, piece) for piece in (text[:at], text[at:]) if piece]
    return [part]


def streamed(parts):
    """Returns the blocks of an answer whose parts come one by one."""
    writer = BlockEvents()
    events = [event for part in parts for event in writer.of([part])]
    return put_together([*events, *writer.end()])


def read(blocks):
    return orjson.loads(orjson.dumps(blocks))


def test_the_whole_answer_has_a_block_for_each_run_of_parts():
    assert read(whole_blocks(THINKS_AND_CALLS)) == [
        {"type": "thinking", "thinking": "Let me see. Rome, 3 days…", "signature": SIGNATURE},
        {"type": "text", "text": "I book it.\n"},
        {
            "type": "tool_use",
            "id": "call_1",
            "name": "book_trip",
            "input": {"city": "Röm", "days": [1, 2, 3], "hotel": None},
        },
        {"type": "tool_use", "id": "call_2", "name": "no_arguments", "input": {}},
        {"type": "tool_use", "id": "call_3", "name": "look", "input": {}},
        {"type": "text", "text": "Done."},
        {"type": "thinking", "thinking": "Did I forget something?", "signature": SIGNATURE},
    ]


def test_the_streamed_answer_is_the_whole_one_at_every_cut():
    whole = read(whole_blocks(THINKS_AND_CALLS))
    for at in range(60):
        assert streamed([piece for part in THINKS_AND_CALLS for piece in cut(part, at)]) == whole


def test_an_answer_that_is_cut_anywhere_is_the_same_whole_and_streamed():
    for last in range(1, len(THINKS_AND_CALLS) + 1):
        for at in range(1, 60):
            parts = THINKS_AND_CALLS[: last - 1] + cut(THINKS_AND_CALLS[last - 1], at)[:1]
            assert streamed(parts) == read(whole_blocks(parts))


texts = st.text(min_size=1, max_size=8)
calls = st.tuples(texts, st.dictionaries(texts, st.integers(-(2**53), 2**53) | texts | st.none(), max_size=3))


@settings(max_examples=50, deadline=None)
@given(st.lists(texts.map(Reasoning) | texts.map(Content) | calls, max_size=6), st.data())
def test_any_answer_is_the_same_whole_and_streamed(said, data):
    parts, num_calls = [], 0
    for part in said:
        if isinstance(part, tuple):
            name, arguments = part
            parts.append(CallBegun(num_calls, f"call_{num_calls}", name))
            parts.append(CallArguments(num_calls, orjson.dumps(arguments).decode()))
            num_calls += 1
        else:
            parts.append(part)
    pieces = [piece for part in parts for piece in cut(part, data.draw(st.integers(0, 8)))]
    whole = read(whole_blocks(parts))
    assert read(whole_blocks(pieces)) == whole
    assert streamed(pieces) == (whole if parts else [])


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": "x', {}),
        ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
        ('{"a": NaN, "b": Infinity}', {"a": None, "b": None}),
        ('{"a": ' + "[" * 5000, {}),
    ],
)
def test_of_arguments_that_are_cut_off_the_complete_values_are_left(arguments, value):
    (block,) = whole_blocks([CallBegun(0, "call_1", "look"), CallArguments(0, arguments)])
    assert read(block)["input"] == value


def test_integers_of_any_size_reach_the_client():
    digits = "9" * 60
    (block,) = whole_blocks([CallBegun(0, "call_1", "look"), CallArguments(0, f'{{"n": {digits}}}')])
    assert f'"n":{digits}' in orjson.dumps(block).decode()


def test_an_answer_without_anything_is_an_empty_text():
    assert whole_blocks([]) == [{"type": "text", "text": ""}]
