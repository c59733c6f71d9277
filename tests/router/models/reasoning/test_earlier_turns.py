"""Templates get the thinking of earlier turns apart from the content, whatever form the client sends."""

import pytest

from router.models.chat_messages import checked_messages
from router.models.reasoning.earlier_turns import with_reasoning
from router.models.reasoning.format_names import GRANITE, THINK_TAGS
from wire.errors import InvalidRequestError

THOUGHT = {"role": "assistant", "content": "b", "reasoning_content": "a", "reasoning": "a"}


def turns(*messages, form=THINK_TAGS):
    return with_reasoning(checked_messages(list(messages)), form)


@pytest.mark.parametrize("form", [THINK_TAGS, None])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_both_names_of_the_field_are_understood(name, form):
    assert turns({"role": "assistant", "content": "b", name: "\na\n"}, form=form) == [THOUGHT]
    both = {"role": "assistant", "content": "b", name: "a", "reasoning_content": "a"}
    assert turns(both, form=form) == [THOUGHT]


def test_thinking_in_the_content_is_taken_out_of_it():
    assert turns({"role": "assistant", "content": "\n<think>\na\n</think>\n\nb"}) == [THOUGHT]
    said = "Here's my thought process:a\nHere is my response:b"
    assert turns({"role": "assistant", "content": said}, form=GRANITE) == [THOUGHT]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "a <think>b</think>"},
        {"role": "assistant", "content": "<think>a"},
        {"role": "user", "content": "<think>a</think>b"},
    ],
)
def test_other_messages_stay_as_they_are(message):
    assert turns(message) == [message]
    said = {"role": "assistant", "content": "<think>a</think>b"}
    assert turns(said, form=None) == [said]
    assert turns(said | {"reasoning": None}) == [THOUGHT]


def test_a_field_of_another_type_is_refused():
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].reasoning must be a string, got 5"):
        turns({"role": "assistant", "content": "b", "reasoning": 5})
