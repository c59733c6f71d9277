import asyncio
import json

import pytest

from router.tokenizer import Tokenizer
from tests.router.conftest import MODEL, Stack, until
from tests.router.scripted_servers import MAX_MODEL_LEN, failing, hanging, saying, silent
from tests.router.tokenizers_for_tests import EOS
from wire.errors import CapacityError, TwinfangError


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


async def events_of(stack: Stack, started: asyncio.Event | None = None, **body) -> list[dict]:
    """The data of all events of a stream, in order, without the end mark; ``started`` is set at the first."""
    request = {"model": MODEL, "prompt": "hello", "stream": True} | body
    async with stack.client.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        lines = []
        async for line in response.aiter_lines():
            lines += [line] if line else []
            if started is not None:
                started.set()
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


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


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_text_tokens_and_request(make_stack, words, stream, per_step):
    stack = await make_stack()
    tokens = words.encode_now("hello wor-END-ld this goes on for ever")
    stack.decode[0].script = saying(tokens, per_step=per_step)
    body = {"stop": ["-END-", "never"], "max_tokens": 200, "return_token_ids": True}
    if stream:
        choices = [chunk["choices"][0] for chunk in await events_of(stack, **body)]
    else:
        choices = (await stack.complete(**body)).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hello wor"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "-END-")
    kept = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert words.decode(kept) == "hello wor-END-"
    if per_step == 1:
        await until(lambda: stack.decode[0].cancelled == [stack.decode[0].submitted[0].request_id])


async def test_text_that_may_become_a_stop_string_is_not_streamed_yet(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying([*words.encode_now("a-E"), *words.encode_now("N!")])
    texts = [chunk["choices"][0]["text"] for chunk in await events_of(stack, stop="-END")]
    assert "".join(texts) == "a-EN!"
    assert "-" not in "".join(texts[:3])


async def test_the_stop_string_is_kept_if_asked_for(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("one\n\ntwo"))
    body = {"stop": "\n\n", "max_tokens": 50}
    assert (await stack.complete(**body)).json()["choices"][0]["text"] == "one"
    kept = await stack.complete(**body, include_stop_str_in_output=True)
    assert kept.json()["choices"][0]["text"] == "one\n\n"


async def test_stop_strings_within_min_tokens_do_not_count(make_stack, words):
    stack = await make_stack()
    tokens = words.encode_now("x;y;z")
    stack.decode[0].script = saying(tokens)
    answer = await stack.complete(stop=";", min_tokens=2, max_tokens=50)
    assert answer.json()["choices"][0]["text"] == "x;y"
    assert stack.decode[0].submitted[0].params.min_tokens == 2


async def test_a_stop_token_is_reported_and_its_text_left_out(make_stack, words):
    stack = await make_stack()
    (comma,) = words.encode_now(",")
    stack.decode[0].script = saying([*words.encode_now("hello"), comma], ends=True)
    body = {"stop_token_ids": [comma], "return_token_ids": True}
    choice = (await stack.complete(**body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", comma)
    assert choice["token_ids"][-1] == comma
    kept = await stack.complete(**body, include_stop_str_in_output=True)
    assert kept.json()["choices"][0]["text"] == "hello,"


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


def expected_logprobs(words: Tokenizer, token_ids: list[int], num_top: int) -> list[dict[str, float]]:
    return [
        {words.decode_token(token_id): -0.25} | {words.decode_token(10 + i): -0.5 - i for i in range(num_top)}
        for token_id in token_ids
    ]


@pytest.mark.parametrize("num_top", [0, 3])
async def test_logprobs_come_as_four_parallel_lists(make_stack, words, num_top):
    stack = await make_stack()
    tokens = words.encode_now(" world 😀")
    stack.decode[0].script = saying(tokens)
    choice = (await stack.complete(logprobs=num_top)).json()["choices"][0]
    table = choice["logprobs"]
    assert table["tokens"] == [words.decode_token(token_id) for token_id in tokens]
    assert table["token_logprobs"] == [-0.25] * len(tokens)
    assert table["top_logprobs"] == expected_logprobs(words, tokens, num_top)
    for token, offset in zip(table["tokens"], table["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer_with_its_logprobs(make_stack, words, stream):
    stack = await make_stack()
    prompt, tokens = words.encode_now("hello, world"), words.encode_now(" this is")
    stack.decode[0].script = saying(tokens)
    body = {"prompt": "hello, world", "echo": True, "logprobs": 2}
    if stream:
        choices = [chunk["choices"][0] for chunk in await events_of(stack, **body)]
    else:
        choices = (await stack.complete(**body)).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text == "hello, world this is"
    table = {
        name: [item for choice in choices for item in choice["logprobs"][name]]
        for name in choices[0]["logprobs"]
    }
    assert table["tokens"] == [words.decode_token(token_id) for token_id in [*prompt, *tokens]]
    assert table["token_logprobs"] == [None, *[-0.25] * (len(prompt) + len(tokens) - 1)]
    assert table["top_logprobs"][0] is None
    assert table["top_logprobs"][1:] == expected_logprobs(words, [*prompt, *tokens][1:], 2)
    for token, offset in zip(table["tokens"], table["text_offset"], strict=True):
        assert text[offset:].startswith(token)


async def test_echo_of_a_single_token_has_nothing_to_look_up(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("!"))
    choice = (await stack.complete(prompt="hello", echo=True, logprobs=1)).json()["choices"][0]
    assert choice["text"] == "hello!"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 5]


async def test_echo_of_token_ids_is_their_text(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("!"))
    answer = await stack.complete(prompt=words.encode_now("hello world"), echo=True)
    assert answer.json()["choices"][0]["text"] == "hello world!"


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


async def test_an_error_of_a_server_before_the_first_token_is_an_http_error(make_stack):
    stack = await make_stack()
    stack.decode[0].script = failing(CapacityError("no room for it"))
    for stream in (False, True):
        answer = await stack.complete(stream=stream)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "insufficient_capacity"
        assert answer.json()["error"]["message"] == "no room for it"


async def test_an_error_in_the_middle_of_a_stream_is_an_error_event(make_stack):
    stack = await make_stack()
    stack.decode[0].script = failing(TwinfangError("it broke"), after=(300,))
    *_, last = await events_of(stack)
    assert last["error"] == {
        "message": "it broke",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


async def test_one_failed_choice_ends_the_others(make_stack):
    stack = await make_stack()

    async def script(submit, send):
        if submit.params.seed == 1:
            await failing(TwinfangError("it broke"))(submit, send)
        else:
            await hanging(submit, send)

    stack.decode[0].script = script
    answer = await stack.complete(n=3, seed=0)
    assert answer.status_code == 500
    await until(lambda: len(stack.decode[0].cancelled) == 2)


@pytest.mark.parametrize("script", [hanging, silent])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_request_on_the_decode_server(make_stack, script, stream):
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = script
    request = asyncio.create_task(stack.complete(stream=stream))
    await until(lambda: decode.submitted)
    request.cancel()
    await until(lambda: decode.cancelled == [decode.submitted[0].request_id])
    await until(lambda: stack.gate.num_in_flight == 0)
    assert await stack.metric("twinfang_requests_total", outcome="cancelled") == 1
    assert await stack.metric("twinfang_requests_in_flight") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_during_prefill_cancels_the_prefill(make_stack, stream):
    stack = await make_stack()
    prefill = stack.prefill[0]

    async def never(_request):
        await asyncio.Event().wait()

    prefill.script = never
    request = asyncio.create_task(stack.complete(prompt="hello world", stream=stream))
    await until(lambda: prefill.requests)
    request.cancel()
    await until(lambda: prefill.num_cancelled == 1)
    await until(lambda: prefill.abandoned == [prefill.requests[0].request_id])
    assert stack.decode[0].submitted == []


async def test_a_ticket_without_a_decode_server_is_given_back(make_stack):
    stack = await make_stack()
    prefill, decode = stack.prefill[0], stack.decode[0]

    async def lose_decode(request):
        await decode.stop()
        await until(lambda: stack.services.pool.num_connected()["decode"] == 0)
        return prefill.reply(request)

    prefill.script = lose_decode
    answer = await stack.complete(prompt="hello world")
    assert answer.status_code == 503
    await until(lambda: prefill.abandoned == [prefill.requests[0].request_id])


async def test_another_decode_server_takes_the_ticket_of_one_that_was_lost(make_stack, words):
    stack = await make_stack(num_decode=2)
    prefill = stack.prefill[0]

    async def lose_first_choice(request):
        await stack.decode[0].stop()
        await until(lambda: stack.services.pool.num_connected()["decode"] == 1)
        return prefill.reply(request)

    stack.decode[1].script = saying(words.encode_now(" again"))
    prefill.script = lose_first_choice
    answer = await stack.complete(prompt="hello world")
    assert answer.json()["choices"][0]["text"] == " again"
    assert prefill.abandoned == []


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_on_a_stream_that_breaks_end_with_an_error_and_later_ones_are_served(
    make_stack, words, stream
):
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = hanging
    started = asyncio.Event()
    request = asyncio.create_task(events_of(stack, started) if stream else stack.complete())
    # A stream that breaks before its first event is still an ordinary error.
    await until(lambda: started.is_set() if stream else decode.submitted)
    await decode.stop()
    if stream:
        error = (await request)[-1]["error"]
    else:
        answer = await request
        assert answer.status_code == 503
        error = answer.json()["error"]
    assert error["code"] == "no_server_available"
    decode.script = saying(words.encode_now(" world"))
    await decode.start()
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    assert (await stack.complete()).json()["choices"][0]["text"] == " world"


async def test_a_request_past_its_time_limit_ends_with_504(make_stack):
    stack = await make_stack(request_timeout_s=0.2)
    stack.decode[0].script = silent
    answer = await stack.complete()
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    await until(lambda: stack.decode[0].cancelled)


async def test_a_router_that_is_full_answers_429(make_stack):
    stack = await make_stack(max_requests_in_flight=2, max_queue=0)
    decode = stack.decode[0]
    decode.script = hanging
    waiting = [asyncio.create_task(stack.complete()) for _ in range(2)]
    await until(lambda: len(decode.submitted) == 2)
    for stream in (False, True):
        answer = await stack.complete(stream=stream)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"
    for request in waiting:
        request.cancel()
    await until(lambda: stack.gate.num_in_flight == 0)
    decode.script = saying([300])
    assert (await stack.complete()).status_code == 200


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
