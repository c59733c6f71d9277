"""The fast way to make text gives the same text as the slow way."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.event_stream import event
from router.observe.token_metrics import TokenMetrics
from router.serving.answer import Answer, Delta
from router.serving.inbox import Inbox
from router.serving.text_lane import TextLane
from testing.router.tokenizers import byte_level
from wire.messages.generation import RequestOutput
from wire.messages.sampling_params import SamplingParams

BYTE_LEVEL = byte_level()


def write(text):
    return event({"id": 'a "quoted" name', "choices": [{"index": 0, "text": text, "logprobs": None}]})


class Way:
    """What the lane leaves to others."""

    def __init__(self) -> None:
        self.left = []

    def take_tokens(self, token_ids, now_s):
        self.left.append(token_ids)

    def take_left(self, left, token_ids):
        self.left.append(left)


async def lane_of(said, write_now, write=write, watched="", way=None, own_json=BYTE_LEVEL.own_json):
    inbox = Inbox(lambda _: None)
    reading = asyncio.create_task(inbox.wait())
    await asyncio.sleep(0)
    lane = TextLane(
        said,
        own_json,
        answer_ids=[],
        last_token_s=[1.0],
        inbox=inbox,
        metrics=TokenMetrics(),
        long_way=way or Way(),
        write_now=write_now,
        event=write,
        watched=watched,
    )
    return lane, inbox, reading


def in_loop(work):
    return asyncio.run(work())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_event_of_a_template_is_the_one_that_it_was_made_from(text):
    written = []

    async def work():
        said = answer()
        said.push_text = lambda _: text
        lane, _, reading = await lane_of(
            said, lambda data: written.append(data) or True, own_json=lambda _: None
        )
        lane.take_tokens((1,), 2.0)
        reading.cancel()

    in_loop(work)
    assert written == [write(text)]


async def test_a_text_may_stand_there_several_times_but_must_stand_there():
    def write_twice(text):
        return event({"reasoning_content": text, "reasoning": text})

    written = []
    said = answer()
    said.push_text = lambda _: 'a "b"'
    lane, _, reading = await lane_of(
        said, lambda data: written.append(data) or True, write_twice, own_json=lambda _: None
    )
    lane.take_tokens((1,), 2.0)
    reading.cancel()
    assert written == [write_twice('a "b"')]
    with pytest.raises(ValueError, match="does not contain its text"):
        await lane_of(said, lambda _: True, lambda _: event({}))


async def test_a_watched_lane_leaves_texts_with_the_character_to_others():
    written, way = [], Way()
    said, texts = answer(), iter(["a", "b <", "c"])
    said.push_text = lambda _: next(texts)
    lane, _, reading = await lane_of(said, lambda data: written.append(data) or True, watched="<", way=way)
    for i in range(3):
        lane.take_tokens((i,), 2.0)
    reading.cancel()
    assert written == [write("a"), write("c")]
    assert way.left == [Delta("b <", [1])]


async def test_tokens_do_not_overtake_others():
    written, way = [], Way()
    lane, inbox, reading = await lane_of(answer(), lambda data: written.append(data) or True, way=way)
    inbox.put((0, Delta("earlier", [7])))
    lane.take_tokens((300,), 2.0)
    assert (written, way.left) == ([], [(300,)])
    assert await reading


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

    short, long, way = answer(), answer(), Way()

    async def work():
        nonlocal is_slow
        lane, _, reading = await lane_of(short, write_now, way=way)
        for i, token_ids in enumerate(steps):
            is_slow = i in slow_steps
            lane.take_tokens(tuple(token_ids), 2.0 + i)
            assert len(way.left) == is_slow
            if is_slow:
                left = way.left.pop()
                assert left.token_ids == token_ids
                texts.append(left.text)
            else:
                texts.append(json.loads(written[-1][6:])["choices"][0]["text"])
        reading.cancel()
        assert lane._answer_ids == [token_id for token_ids in steps for token_id in token_ids]

    in_loop(work)
    assert texts == [long.push(RequestOutput("a", tuple(token_ids))).text for token_ids in steps]
    assert short.num_tokens == long.num_tokens == sum(map(len, steps))
    last = RequestOutput("a", (), finish_reason="length")
    assert short.push(last) == long.push(last)
