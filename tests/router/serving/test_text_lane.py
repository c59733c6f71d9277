"""The fast way to make text gives the same text as the slow way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.event_stream import event
from router.serving.answer import Answer
from router.serving.text_lane import TextLane
from testing.router.tokenizers import byte_level
from wire.messages.generation import RequestOutput
from wire.messages.sampling_params import SamplingParams

BYTE_LEVEL = byte_level()


def write(text):
    return event({"id": 'a "quoted" name', "choices": [{"index": 0, "text": text, "logprobs": None}]})


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_event_of_a_template_is_the_one_that_it_was_made_from(text):
    written = []
    lane = TextLane(lambda data: written.append(data) or True)
    lane.open(write)
    answer = Answer(BYTE_LEVEL, SamplingParams(max_tokens=500), prompt_token_ids=())
    answer.push_text = lambda _: text
    assert lane.write(answer, (1,)) is None
    assert written == [write(text)]


@pytest.mark.parametrize("times", [0, 2])
def test_a_text_that_does_not_stand_there_once_makes_no_template(times):
    with pytest.raises(ValueError, match=f"stands {times} times"):
        TextLane(lambda _: True).open(lambda text: event({"texts": [text] * times}))


def answer():
    return Answer(BYTE_LEVEL, SamplingParams(max_tokens=500), prompt_token_ids=(5, 6, 7))


@given(
    st.lists(st.lists(st.integers(0, 420), min_size=1, max_size=4), max_size=20), st.sets(st.integers(0, 19))
)
def test_text_and_count_are_those_of_the_long_way_whatever_is_left_to_others(steps, slow_steps):
    """In ``slow_steps`` the client takes nothing at once."""
    written, texts = [], []
    is_slow = False

    def write_now(data):
        if not is_slow:
            written.append(data)
        return not is_slow

    short, long = answer(), answer()
    lane = TextLane(write_now)
    lane.open(write)
    for i, token_ids in enumerate(steps):
        is_slow = i in slow_steps
        left = lane.write(short, tuple(token_ids))
        assert (left is not None) == is_slow
        texts.append(json.loads(written[-1][6:])["choices"][0]["text"] if left is None else left.text)
        assert left is None or left.token_ids == token_ids
    assert texts == [long.push(RequestOutput("a", tuple(token_ids))).text for token_ids in steps]
    assert short.num_tokens == long.num_tokens == sum(map(len, steps))
    last = RequestOutput("a", (), finish_reason="length")
    assert short.push(last) == long.push(last)
