"""Where a completion ends: stop strings and stop tokens, in text, token ids and stream."""

import json

import pytest

from testing.conditions import until
from testing.router.scripted_router import MODEL, events_of
from testing.router.scripted_servers import saying


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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
async def test_max_tokens_inside_an_emoji_leaves_it_out_and_counts_its_tokens(
    make_stack, words, endpoint, stream
):
    stack = await make_stack()
    first, *rest = words.encode_now("😀")
    assert rest
    tokens = [*words.encode_now("hello "), first, *rest]
    stack.decode[0].script = saying(tokens)
    is_chat = endpoint == "chat/completions"
    body = {"model": MODEL, "max_tokens": len(tokens) - 1, "return_token_ids": True, "stream": stream}
    body |= {"messages": [{"role": "user", "content": "a"}], "logprobs": True} if is_chat else {"prompt": "a"}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = await stack.client.post(f"/v1/{endpoint}", json=body)
    if not stream:
        answers = [response.json()]
    else:
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        answers = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for answer in answers for choice in answer["choices"]]
    told = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    text = "".join(one.get("content" if is_chat else "text") or "" for one in told)
    assert (text, choices[-1]["finish_reason"]) == ("hello ", "length")
    assert [i for choice in choices for i in choice["token_ids"]] == tokens[:-1]
    assert answers[-1]["usage"]["completion_tokens"] == len(tokens) - 1
    if is_chat:
        told_tokens = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
        assert sum(map(len, told_tokens)) == len(tokens) - 1
