"""The events of an answer, put together, are its items, however its parts were cut."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.responses.output import Output
from router.models.answer_parts import CallArguments, CallBegun, Content, Reasoning

PARTS = [
    Reasoning("I look twice."),
    Content("Let me see."),
    CallBegun(0, "call_1", "look"),
    CallArguments(0, '{"at": 1}'),
    CallBegun(1, "call_2", "look"),
    CallArguments(1, "{}"),
    Content("Done."),
]


def plain(value):
    """Without fragments of JSON."""
    return orjson.loads(orjson.dumps(value))


def whole(parts, status="completed"):
    output = Output("7")
    output.add(parts)
    output.end(status)
    return plain(output.items)


def put_together(events):
    """Items as a client makes them from events, which must agree with each other."""
    items, done = [], []
    for event in plain(events):
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert index == len(items) == len(done)
            items.append(event["item"])
            continue
        if kind == "output_item.done":
            done.append(event["item"])
            continue
        item = items[index]
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        elif kind.endswith("_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind.endswith("_text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        else:
            assert kind == "function_call_arguments.done"
            assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
    for item, ended in zip(items, done, strict=True):
        assert {**item, "status": ended["status"]} == ended
    return done


def cut(parts, sizes):
    """The same parts in more pieces."""
    for part in parts:
        if isinstance(part, CallBegun):
            yield part
            continue
        rest = part.text
        while rest:
            size = next(sizes)
            piece, rest = rest[:size], rest[size:]
            yield type(part)(part.index, piece) if isinstance(part, CallArguments) else type(part)(piece)


@given(st.integers(0, len(PARTS)), st.lists(st.integers(1, 9), min_size=1), st.integers(1, 4))
def test_a_stream_is_the_whole_answer_at_every_cut(num_parts, sizes, a_step):
    def endless():
        while True:
            yield from sizes

    parts = PARTS[:num_parts]
    pieces = list(cut(parts, endless()))
    output, events = Output("7"), []
    for start in range(0, len(pieces), a_step):
        events += output.add(pieces[start : start + a_step])
    events += output.end("incomplete")
    assert put_together(events) == plain(output.items) == whole(parts, "incomplete")


def test_items_are_those_of_the_api():
    thinking, message, first, second, last = whole(PARTS, "incomplete")
    assert thinking == {
        "id": "rs_70000",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I look twice."}],
    }
    assert message == {
        "id": "msg_70001",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
    }
    assert first == {
        "id": "fc_70002",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "look",
        "arguments": '{"at": 1}',
    }
    assert (second["id"], second["arguments"]) == ("fc_70003", "{}")
    assert (last["id"], last["status"]) == ("msg_70004", "incomplete")


def test_an_empty_answer_is_an_empty_message():
    (message,) = whole([])
    assert message["content"][0]["text"] == ""


@pytest.mark.parametrize("num_steps", [1, 3])
def test_log_probabilities_are_with_their_text_and_all_at_the_end(num_steps):
    output, events = Output("7"), []
    for step in range(num_steps):
        events += output.add([Content("a")], [{"token": "a", "logprob": -step}])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["logprobs"][0]["logprob"] for event in deltas] == [-step for step in range(num_steps)]
    *_, text_done, part_done, _item_done = plain(output.end("completed"))
    assert len(text_done["logprobs"]) == len(part_done["part"]["logprobs"]) == num_steps
