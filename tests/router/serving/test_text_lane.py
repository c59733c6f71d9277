"""The fast way to make text gives the same text as the slow way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.event_stream import event
from router.serving.answer import Answer, Delta
from router.serving.text_lane import TextLane, WatchedLane, next_lane
from testing.router.tokenizers import byte_level
from wire.messages.generation import RequestOutput
from wire.messages.sampling_params import SamplingParams

BYTE_LEVEL = byte_level()


def write(text):
    return event({"id": 'a "quoted" name', "choices": [{"index": 0, "text": text, "logprobs": None}]})


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_event_of_a_template_is_the_one_that_it_was_made_from(text):
    written = []
    lane = TextLane(lambda data: written.append(data) or True, write)
    answer = Answer(BYTE_LEVEL, SamplingParams(max_tokens=500), prompt_token_ids=())
    answer.push_text = lambda _: text
    assert lane.write(answer, (1,)) is None
    assert written == [write(text)]


def test_a_text_may_stand_there_several_times_but_must_stand_there():
    def write_twice(text):
        return event({"reasoning_content": text, "reasoning": text})

    written = []
    lane = TextLane(lambda data: written.append(data) or True, write_twice)
    said = answer()
    said.push_text = lambda _: 'a "b"'
    assert lane.write(said, (1,)) is None
    assert written == [write_twice('a "b"')]
    with pytest.raises(ValueError, match="does not contain its text"):
        TextLane(lambda _: True, lambda _: event({}))


def test_a_watched_lane_leaves_texts_with_the_character_to_its_caller():
    written = []
    lane = WatchedLane(lambda data: written.append(data) or True, write, "<")
    said, texts = answer(), iter(["a", "b <", "c"])
    said.push_text = lambda _: next(texts)
    lefts = [lane.write(said, (i,)) for i in range(3)]
    assert written == [write("a"), write("c")]
    assert lefts == [None, Delta("b <", [1]), None]


def test_the_next_lane_is_that_of_the_part_that_comes_next():
    def lane_after(lane, watched):
        return next_lane(lane, watched, lambda _: True, write)

    assert lane_after(None, None) is None
    thinking = lane_after(None, "<")
    assert isinstance(thinking, WatchedLane)
    assert lane_after(thinking, None) is None
    content = lane_after(thinking, "")
    assert isinstance(content, TextLane)
    assert lane_after(content, "") is content


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
    lane = TextLane(write_now, write)
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
