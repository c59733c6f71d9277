"""Requests with much to do leave the event loop to others after each slice."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from router.api.openai import completion_response, logprobs
from router.api.openai.chat_response import ChatWriter
from router.api.openai.completion_response import CompletionWriter
from router.serving import generation
from router.serving.slice_lane import SliceLane
from testing.conditions import until
from testing.router.scripted_router import MODEL, events_of
from testing.router.scripted_servers import logprobs_of, saying
from wire.messages.generation import RequestOutput

NUM_TOP = 20
CHOICE_WEIGHT = generation.OUTPUT_WEIGHT + 1 + 1 + NUM_TOP
"""Of a choice's news of one step."""


@asynccontextmanager
async def counted_turns():
    """Yields a list with the number of turns that the event loop has taken."""
    turns = [0]

    async def count():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        yield turns
    finally:
        counting.cancel()


async def test_one_slice_runs_a_turn_and_those_that_wait_alternate():
    lane, ran = SliceLane(), []
    async with counted_turns() as turns:

        async def work(name):
            for _ in range(5):
                await lane.turn()
                ran.append((name, turns[0]))

        await asyncio.gather(*map(work, "abc"))
    assert "".join(name for name, _ in ran) == "abc" * 5
    assert max(Counter(turn for _, turn in ran).values()) == 1


async def test_who_goes_away_while_waiting_keeps_nobody_else_waiting():
    lane = SliceLane()
    waiting = [asyncio.create_task(lane.turn()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    await waiting[2]
    await lane.turn()
    assert [task.cancelled() for task in waiting] == [True, True, False]


@pytest.fixture
def small_slices(monkeypatch):
    """Two choices with log-probabilities fill one."""
    monkeypatch.setattr(generation, "SLICE_WEIGHT", 2 * CHOICE_WEIGHT)
    monkeypatch.setattr(generation, "LIGHT_WEIGHT", CHOICE_WEIGHT)
    monkeypatch.setattr(completion_response, "SLICE_WEIGHT", 10 * (1 + NUM_TOP))


def steps_at_once(num_steps):
    """All steps of all choices come as one message, as to a router that has been busy."""
    submits = []

    async def script(submit, send):
        submits.append(submit)
        if len(submits) % 8 == 0:
            step = [
                RequestOutput(
                    one.request_id,
                    (60 + i,),
                    logprobs=(logprobs_of(60 + i, NUM_TOP),),
                    finish_reason="length" if i == num_steps - 1 else None,
                )
                for i in range(num_steps)
                for one in submits
            ]
            submits.clear()
            send(*step)

    return script


@pytest.fixture
def written(monkeypatch):
    """Tokens whose log-probabilities were written, as (turn, request) each."""
    found, turns = [], [0]

    def noting(cls, name):
        plain = getattr(cls, name)

        def note(self, index, delta, *args, **further):
            found.extend((turns[0], self._request.id) for _ in delta.logprobs)
            return plain(self, index, delta, *args, **further)

        monkeypatch.setattr(cls, name, note)

    for cls in (CompletionWriter, ChatWriter):
        noting(cls, "written")
        noting(cls, "keep")
    return found, turns


async def test_many_choices_are_written_slice_by_slice_and_requests_take_turns(
    make_stack, small_slices, written
):
    stack = await make_stack()
    stack.decode[0].script = steps_at_once(10)
    found, shown_turns = written
    async with counted_turns() as turns:
        shown_turns[:] = turns

        async def keep_turns():
            while True:
                shown_turns[0] = turns[0]
                await asyncio.sleep(0)

        keeping = asyncio.create_task(keep_turns())
        body = {"n": 4, "max_tokens": 10, "logprobs": NUM_TOP}
        events = await asyncio.gather(events_of(stack, **body), events_of(stack, **body))
        keeping.cancel()
    for told in events:
        choices = [event["choices"][0] for event in told]
        assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 40
    assert len(found) == 2 * 4 * 10
    assert max(Counter(turn for turn, _ in found).values()) <= 2
    order = [request for _, request in found[::2]]
    assert sum(before != after for before, after in pairwise(order)) >= 15  # of 39


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
async def test_an_answer_in_one_piece_is_written_slice_by_slice(make_stack, small_slices, written, endpoint):
    stack = await make_stack()
    stack.decode[0].script = steps_at_once(10)
    found, shown_turns = written

    async def keep_turns():
        while True:
            shown_turns[0] += 1
            await asyncio.sleep(0)

    keeping = asyncio.create_task(keep_turns())
    body = {"model": MODEL, "n": 8, "max_tokens": 10}
    if endpoint == "completions":
        body |= {"prompt": "hello", "logprobs": NUM_TOP}
    else:
        body |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": NUM_TOP}
    response = await stack.client.post(f"/v1/{endpoint}", json=body)
    keeping.cancel()
    assert len(found) == 80
    assert max(Counter(turn for turn, _ in found).values()) <= 2
    for choice in response.json()["choices"]:
        told = choice["logprobs"]
        assert len(told["tokens" if endpoint == "completions" else "content"]) == 10


async def test_an_echoed_prompt_s_log_probabilities_are_written_slice_by_slice_and_once(
    make_stack, small_slices, words, monkeypatch
):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("!"))
    num_turns = 0
    turn = SliceLane.turn

    async def counted(lane):
        nonlocal num_turns
        num_turns += 1
        await turn(lane)

    monkeypatch.setattr(SliceLane, "turn", counted)
    monkeypatch.setattr(generation, "LIGHT_WEIGHT", 10**9)
    prompt = [50 + i for i in range(100)]
    body = {"prompt": prompt, "echo": True, "logprobs": NUM_TOP, "max_tokens": 1, "n": 3}
    choices = (await stack.complete(**body)).json()["choices"]
    assert num_turns >= 9  # between ten slices of ten tokens
    for choice in choices:
        assert choice["logprobs"]["tokens"][:-1] == [words.decode_token(token_id) for token_id in prompt]
        assert len(choice["logprobs"]["top_logprobs"]) == 101


async def test_a_request_whose_news_fill_the_memory_ends_and_others_go_on(make_stack, words):
    stack = await make_stack()
    stack.services.backlog._max_weight = 1000
    stack.decode[0].script = steps_at_once(10)
    response = await stack.complete(n=8, max_tokens=10, logprobs=NUM_TOP)
    assert response.status_code == 429
    assert "read faster" in response.json()["error"]["message"]
    assert len(stack.decode[0].cancelled) <= 8
    assert stack.services.backlog.weight == 0
    stack.decode[0].script = saying(words.encode_now("!"))
    assert (await stack.complete(logprobs=1)).status_code == 200
    await until(lambda: stack.gate.num_in_flight == 0)


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"n": 8, "logprobs": 20}, "logprobs", "8 choices with 20 alternatives a token make 168"),
        ({"n": 2, "logprobs": 1, "max_tokens": 126}, "max_tokens", "at most 125 max_tokens"),
        (
            {"prompt": [5] * 126, "n": 2, "logprobs": 1, "echo": True, "max_tokens": 1},
            "logprobs",
            "252 tokens",
        ),
    ],
)
async def test_more_log_probabilities_than_the_limits_are_refused(
    make_stack, monkeypatch, asked, param, says
):
    monkeypatch.setattr(logprobs, "MAX_IN_STEP", 160)
    monkeypatch.setattr(logprobs, "MAX_KEPT", 500)
    stack = await make_stack()
    response = await stack.complete(**asked)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True), error


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_may_be_longer_than_an_answer_in_one_piece(make_stack, monkeypatch, words, stream):
    monkeypatch.setattr(logprobs, "MAX_KEPT", 500)
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("hello world"))
    response = await stack.chat(n=2, max_tokens=126, logprobs=True, top_logprobs=1, stream=stream)
    assert response.status_code == (200 if stream else 400)
    if not stream:
        assert response.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(("stream", "longest"), [(False, 125), (True, None)])
async def test_a_chat_that_names_no_length_gets_one_that_its_log_probabilities_allow(
    make_stack, monkeypatch, words, stream, longest
):
    monkeypatch.setattr(logprobs, "MAX_KEPT", 500)
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("hello world"))
    response = await stack.chat(n=2, logprobs=True, top_logprobs=1, stream=stream)
    assert response.status_code == 200
    asked = {submit.params.max_tokens for submit in stack.decode[0].submitted}
    assert len(asked) == 1
    assert (asked == {longest}) == (longest is not None)


def test_openai_s_maxima_are_within_the_limit_of_a_step():
    logprobs.check_in_step(128, 20, param="top_logprobs")


async def test_a_long_answer_leaves_in_parts_and_is_whole(make_stack, monkeypatch, words):
    monkeypatch.setattr("router.http.json_answer.PART_BYTES", 1000)
    stack = await make_stack()
    tokens = words.encode_now("hello world this is it")
    stack.decode[0].script = saying(tokens)
    response = await stack.complete(logprobs=5, n=4)
    assert int(response.headers["content-length"]) == len(response.content) > 2000
    assert [len(choice["logprobs"]["tokens"]) for choice in response.json()["choices"]] == [len(tokens)] * 4
    assert json.loads(response.content)["usage"]["completion_tokens"] == 4 * len(tokens)
