"""Completions that succeed: what the router asks servers for, and what the client gets."""

import asyncio
import json

import pytest

from testing.router.scripted_router import MODEL, events_of
from testing.router.scripted_servers import MAX_MODEL_LEN, saying
from testing.router.tokenizers import EOS


async def test_a_completion_goes_through_prefill_ticket_and_decode(make_stack, words):
    stack = await make_stack()
    answer = words.encode_now(" world, this is")
    stack.decode[0].script = saying([*answer, EOS], ends=True)
    response = await stack.complete(prompt="hello world", max_tokens=50)
    assert response.status_code == 200, response.text
    body = response.json()
    prompt = words.encode_now("hello world")
    assert body["choices"] == [
        {
            "index": 0,
            "text": " world, this is",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(answer) + 1,
        "total_tokens": len(prompt) + len(answer) + 1,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", MODEL, "cmpl-")
    (prefilled,), (submitted,) = stack.prefill[0].requests, stack.decode[0].submitted
    assert prefilled.token_ids == submitted.token_ids == tuple(prompt)
    assert submitted.ticket is not None
    assert submitted.ticket.request_id == prefilled.request_id == submitted.request_id
    assert stack.prefill[0].abandoned == []


async def test_streamed_chunks_add_up_to_the_answer(make_stack, words):
    stack = await make_stack()
    text = " wörld 😀 this is a test"
    stack.decode[0].script = saying(words.encode_now(text))
    async with stack.client.stream(
        "POST",
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": "hello world",
            "stream": True,
            "max_tokens": 100,
            "stream_options": {"include_usage": True},
        },
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(words.encode_now(text))
    assert {chunk["id"] for chunk in chunks} == {last["id"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_completes(make_stack, words, stream):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now(" world"))
    if stream:
        chunks = await stack.openai.completions.create(model=MODEL, prompt="hello", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in chunks])
    else:
        text = (await stack.openai.completions.create(model=MODEL, prompt="hello")).choices[0].text
    assert text == " world"


async def test_a_prompt_of_one_token_goes_straight_to_the_decode_server(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    assert (await stack.complete(prompt=[42])).status_code == 200
    assert stack.prefill[0].requests == []
    assert stack.decode[0].submitted[0].ticket is None


async def test_a_server_of_both_roles_needs_no_prefill_server(make_stack, words):
    stack = await make_stack(num_prefill=0, role="both")
    stack.decode[0].script = saying(words.encode_now(" world"))
    response = await stack.complete(prompt="hello world")
    assert response.json()["choices"][0]["text"] == " world"
    assert stack.decode[0].submitted[0].ticket is None


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_have_the_right_indices(make_stack, words, stream):
    stack = await make_stack(num_decode=2)
    texts = {"hello world": " one", "this is": " two"}

    async def script(submit, send):
        text = next(texts[p] for p in texts if tuple(words.encode_now(p)) == submit.token_ids)
        await saying(words.encode_now(f"{text} {submit.params.seed}"))(submit, send)

    for server in stack.decode:
        server.script = script
    body = {"prompt": list(texts), "n": 2, "seed": 7, "max_tokens": 50}
    if stream:
        found: dict[int, str] = {}
        for chunk in await events_of(stack, **body):
            (choice,) = chunk["choices"]
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    else:
        answer = (await stack.complete(**body)).json()
        found = {choice["index"]: choice["text"] for choice in answer["choices"]}
        num_prompt_tokens = sum(len(words.encode_now(p)) for p in texts)
        assert answer["usage"]["prompt_tokens"] == num_prompt_tokens
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert found == {0: " one 7", 1: " one 8", 2: " two 7", 3: " two 8"}
    assert len({submit.request_id for server in stack.decode for submit in server.submitted}) == 4


async def test_token_ids_come_in_deltas_and_the_prompt_s_once(make_stack, words):
    stack = await make_stack()
    tokens = words.encode_now(" world, this")
    stack.decode[0].script = saying(tokens)
    choices = [chunk["choices"][0] for chunk in await events_of(stack, return_token_ids=True)]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == tokens
    assert [choice["prompt_token_ids"] for choice in choices] == [
        words.encode_now("hello"),
        *[None] * (len(choices) - 1),
    ]


async def test_usage_comes_with_every_chunk_if_asked_for(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying([300, 301, 302])
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await events_of(stack, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in [*chunks, last]] == [1, 2, 3, 3]


async def test_tokens_that_arrive_together_leave_as_one_event(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("hello world, this is a test"), per_step=100)
    assert len(await events_of(stack, max_tokens=100)) == 1


async def test_sampling_fields_reach_the_server(make_stack):
    stack = await make_stack(generation={"temperature": 0.5, "top_k": 40, "top_p": 0.9})
    stack.decode[0].script = saying([300])
    fields = {
        "temperature": 0,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"7": 5, "8": -100},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "speculate": False,
        "min_tokens": 3,
        "max_tokens": 5,
        "seed": (1 << 63) - 1,
        "n": 2,
        "best_of": 2,
        "user": "someone",
        "unknown_field": {"is": "ignored"},
    }
    assert (await stack.complete(**fields)).status_code == 200
    params = stack.decode[0].submitted[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.5, -0.5)
    assert params.logit_bias == ((7, 5.0), (8, -100.0))
    assert (params.stop_token_ids, params.ignore_eos) == ((9,), True)
    assert (params.min_tokens, params.max_tokens) == (3, 5)
    assert params.speculate is False
    assert sorted(s.params.seed for s in stack.decode[0].submitted) == [-(1 << 63), (1 << 63) - 1]
    stack.decode[0].submitted.clear()
    nulls = dict.fromkeys(["temperature", "n", "stop", "seed", "max_tokens", "stream", "logprobs", "echo"])
    assert (await stack.complete(**nulls, speculate=None)).status_code == 200
    params = stack.decode[0].submitted[0].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 40, 16)
    assert params.seed is not None, "the router chooses one, so that the answer can go on elsewhere"
    assert params.speculate is True


async def test_request_ids_are_taken_and_returned(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    body = {"model": MODEL, "prompt": "hello"}
    given = await stack.client.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    assert given.json()["id"] == "cmpl-abc-1"
    for bad in ("with space", "x" * 200, "in\tjection"):
        made = await stack.client.post("/v1/completions", json=body, headers={"X-Request-Id": bad})
        assert made.json()["id"] == f"cmpl-{made.headers['x-request-id']}"
        assert bad not in made.json()["id"]


async def test_requests_take_turns_on_the_servers(make_stack):
    stack = await make_stack(num_prefill=2, num_decode=2)
    for server in stack.decode:
        server.script = saying([300])
    for _ in range(6):
        assert (await stack.complete(prompt="hello world")).status_code == 200
    assert [len(server.requests) for server in stack.prefill] == [3, 3]
    assert [len(server.submitted) for server in stack.decode] == [3, 3]


async def test_many_requests_at_once_get_their_own_answers(make_stack, words):
    stack = await make_stack(num_prefill=2, num_decode=2)

    async def echo(submit, send):
        await saying(list(submit.token_ids), per_step=2)(submit, send)

    for server in stack.decode:
        server.script = echo

    async def ask(i: int) -> bool:
        text = f"request number {i}"
        answer = await stack.complete(prompt=text, max_tokens=64)
        return answer.json()["choices"][0]["text"] == text

    assert all(await asyncio.gather(*(ask(i) for i in range(100))))


async def test_a_prompt_may_fill_the_context_up_to_max_tokens(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300] * 4)
    fits = await stack.complete(prompt=[5] * (MAX_MODEL_LEN - 4), max_tokens=4)
    assert fits.status_code == 200
    too_long = await stack.complete(prompt=[5] * (MAX_MODEL_LEN - 4), max_tokens=5)
    error = too_long.json()["error"]
    assert (too_long.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"{MAX_MODEL_LEN} tokens" in error["message"]
    assert "at most 4 max_tokens" in error["message"]
