"""Items of ``input`` become the messages of a chat."""

import time

import pytest

from router.api.responses.input_items import checked_items, messages_of
from wire.errors import InvalidRequestError

CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "a cat"}


def said(role, text):
    return {"role": role, "content": text}


def thought(*texts):
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts("reasoning_text", *texts)}


def parts(kind, *texts):
    return [{"type": kind, "text": text} for text in texts]


def messages(*items, instructions=None):
    return messages_of(instructions, checked_items(list(items)))


def test_a_text_is_what_the_user_says():
    assert messages_of(None, checked_items("hello")) == [said("user", "hello")]


def test_a_turn_of_the_model_is_one_message():
    answer = {"type": "message", "role": "assistant", "content": parts("output_text", "I look.")}
    turn = messages(said("user", "look"), thought("Hm."), answer, CALL, CALL | {"call_id": "call_2"}, OUTPUT)
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    assert turn == [
        said("user", "look"),
        {
            **said("assistant", "I look."),
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", **call}, {"id": "call_2", **call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a cat"},
    ]


def test_two_answers_are_two_messages_and_thinking_belongs_to_what_follows():
    assert messages(said("assistant", "a"), thought("b", "c"), thought("d"), said("assistant", "e")) == [
        said("assistant", "a"),
        {**said("assistant", "e"), "reasoning_content": "b\nc\nd"},
    ]
    assert messages(thought("a"), CALL)[0]["reasoning_content"] == "a"
    assert messages(thought("a"), said("user", "b"))[1] == said("user", "b")
    assert messages({"type": "reasoning", "encrypted_content": "x", "summary": []}) == []


def test_system_messages_at_the_beginning_are_one():
    found = messages(said("developer", "b"), said("system", "c"), said("user", "d"), instructions="a")
    assert found == [said("system", "a\n\nb\n\nc"), said("user", "d")]
    late = messages(said("user", "a"), said("developer", "b"))
    assert late[1] == said("system", "b")


@pytest.mark.parametrize(
    ("first", "further"),
    [
        (said("system", "a" * 7_000_000), [said("developer", "b")]),
        (thought("a" * 7_000_000), [thought("b")]),
        (thought("a" * 7_000_000), [said("assistant", ""), thought("b")]),
    ],
)
def test_many_short_items_behind_a_long_one_are_read_at_once(first, further):
    """To copy the long text for each short one would take half a minute."""
    items = checked_items([first, *further * (16_000 // len(further))])
    began = time.process_time()
    (message,) = messages_of(None, items)
    assert time.process_time() - began < 2
    assert len(message["content"]) + len(message.get("reasoning_content", "")) > 7_000_000


def test_parts_are_texts_of_any_kind():
    content = [*parts("input_text", "a"), {"type": "refusal", "refusal": "b"}]
    assert messages({"role": "user", "content": content}) == [said("user", "a\nb")]
    assert messages(OUTPUT | {"output": parts("input_text", "a", "b")})[0]["content"] == "a\nb"


def test_what_is_stored_of_an_item_means_the_same_again():
    answer = {"role": "assistant", "content": "a", "phase": "final_answer", "id": "msg_1"}
    items = checked_items([answer, thought("b"), CALL, OUTPUT, said("user", "c")])
    assert items[0] == {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
        "status": "completed",
        "id": "msg_1",
    }
    assert checked_items(items) == items


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (5, "input[0] must be an object, got 5"),
        ({}, "input[0] is of type None"),
        ({"type": ["message"]}, "input[0] is of type ['message']"),
        ({"type": "web_search_call"}, "input[0] is of type 'web_search_call', which is not supported"),
        ({"type": "item_reference", "id": "a"}, "'item_reference'"),
        ({"role": "tool", "content": "a"}, "input[0].role must be one of"),
        ({"role": "user"}, "input[0].content must be a string or a list"),
        ({"role": "user", "content": [5]}, "input[0].content[0] is 5"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0] is 'input_image'"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text must be a string"),
        ({"role": "user", "content": "a", "id": 5}, "input[0].id must be a string"),
        (CALL | {"name": ""}, "input[0].name must not be empty"),
        (CALL | {"arguments": {}}, "input[0].arguments must be a string"),
        (OUTPUT | {"call_id": None}, "input[0].call_id must be a string"),
        (OUTPUT | {"output": [{"type": "input_image"}]}, "input[0].output[0] is 'input_image'"),
        ({"type": "reasoning", "content": 5}, "input[0].content must be a string or a list"),
    ],
)
def test_what_is_wrong_is_named(item, error):
    with pytest.raises(InvalidRequestError) as refused:
        checked_items([item])
    assert error in refused.value.message
    assert refused.value.param == "input"
