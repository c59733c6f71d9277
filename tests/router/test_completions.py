import json

import pytest

from tests.router.conftest import MODEL
from tests.router.scripted_servers import saying
from tests.router.tokenizers_for_tests import EOS


async def test_a_completion_goes_through_prefill_ticket_and_decode(make_stack, words):
    stack = await make_stack()
    answer = words.encode_now(" world, this is")
    stack.decode[0].script = saying([*answer, EOS], ends=True)
    response = await stack.complete(prompt="hello", max_tokens=50)
    assert response.status_code == 200, response.text
    body = response.json()
    prompt = words.encode_now("hello")
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
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", MODEL, "cmpl-")


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
