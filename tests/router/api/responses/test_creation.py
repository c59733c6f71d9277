"""``POST /v1/responses`` over HTTP, in front of scripted servers."""

import json

import pytest

from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import MAX_MODEL_LEN, failing, saying
from testing.router.tokenizers import EOS
from wire.errors import GrammarError

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
TOKENS = "/v1/responses/input_tokens"


async def create(stack, **body):
    return await stack.client.post("/v1/responses", json={"model": MODEL, "input": "hello"} | body)


async def events_of(stack, **body):
    """The events of a stream. Each is named twice, and numbered."""
    response = await create(stack, stream=True, **body)
    assert response.status_code == 200, response.text
    pairs = [event.split("\n") for event in response.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(stack):
    """The text of the last prompt that a server got."""
    return stack.tokenizer.decode(list(stack.decode[0].submitted[-1].token_ids), skip_special_tokens=False)


@pytest.fixture
async def stack(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying([*words.encode_now("this is a test"), EOS], ends=True)
    return stack


async def test_a_response_has_what_was_asked_and_what_was_answered(stack):
    response = await create(stack, instructions="be brief", metadata={"a": "b"}, temperature=0, user="me")
    assert response.status_code == 200, response.text
    body = response.json()
    assert prompt_of(stack) == "<s>system\nbe brief</s>\n<s>user\nhello</s>\n<s>assistant\n"
    num_tokens = len(stack.decode[0].submitted[0].token_ids)
    (message,) = body.pop("output")
    assert message["content"] == [
        {"type": "output_text", "text": "this is a test", "annotations": [], "logprobs": []}
    ]
    usage = body.pop("usage")
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (num_tokens, 4)
    assert usage["total_tokens"] == num_tokens + usage["output_tokens"]
    assert body.pop("id").startswith("resp_")
    assert body.pop("completed_at") >= body.pop("created_at")
    assert body == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": MODEL,
        "background": False,
        "instructions": "be brief",
        "max_output_tokens": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 0.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": "me",
    }


async def test_a_streams_last_event_has_the_whole_response(stack):
    whole = (await create(stack)).json()
    events = await events_of(stack)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    streamed = events[-1]["response"]
    assert events[0]["response"] == events[1]["response"]
    assert (
        events[0]["response"]
        | {name: streamed[name] for name in ("output", "usage", "status", "completed_at")}
        == streamed
    )
    for one in (whole, streamed):
        del one["id"], one["output"][0]["id"], one["created_at"], one["completed_at"]
    assert streamed == whole


async def test_an_answer_that_is_cut_off_is_incomplete(stack):
    whole = (await create(stack, max_output_tokens=2)).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (whole["completed_at"], whole["output"][0]["status"]) == (None, "incomplete")
    last = (await events_of(stack, max_output_tokens=2))[-1]
    assert (last["type"], last["response"]["usage"]["output_tokens"]) == ("response.incomplete", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_all_tokens(stack, words, stream):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        *events, last = await events_of(stack, **fields)
        body = last["response"]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        told = [one for event in deltas for one in event["logprobs"]]
    else:
        body = (await create(stack, **fields)).json()
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in logprobs][:-1] == [
        words.decode_token(token_id) for token_id in words.encode_now("this is a test")
    ]
    assert all(len(one["top_logprobs"]) == 2 for one in logprobs)
    assert not stream or told == logprobs
    assert body["top_logprobs"] == 2


async def test_fields_reach_the_server(stack):
    fields = {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 7, "stop": "x"}
    assert (await create(stack, **fields, ignore_eos=True, repetition_penalty=1.5)).status_code == 200
    params = stack.decode[0].submitted[0].params
    found = (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed)
    assert found == (5, 0.5, 0.25, 3, 7)
    assert (params.ignore_eos, params.repetition_penalty) == (True, 1.5)
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    assert (await create(stack, text=form)).json()["text"] == form
    assert "object" in stack.decode[0].submitted[1].params.grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_an_item(make_stack, words, stream):
    stack = await make_stack(tool_call_parser="hermes")
    text = 'I look.<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    stack.decode[0].script = saying([*words.encode_now(text), EOS], ends=True)
    if stream:
        events = await events_of(stack, tools=[TOOL])
        body = events[-1]["response"]
        assert "response.function_call_arguments.done" in {event["type"] for event in events}
    else:
        body = (await create(stack, tools=[TOOL])).json()
    message, call = body["output"]
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "look", {})
    assert body["tools"] == [TOOL]
    earlier = [{"role": "user", "content": "hello"}, *body["output"]]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a cat"}
    again = await create(stack, input=[*earlier, output], tools=[TOOL], tool_choice="none")
    assert again.status_code == 200, again.text
    assert prompt_of(stack).endswith("<s>assistant\nI look.</s>\n<s>tool\na cat</s>\n<s>assistant\n")


async def test_a_choice_of_tools_is_that_of_the_chat(stack):
    await create(stack, tools=[TOOL], tool_choice={"type": "function", "name": "look"})
    assert "look" in stack.decode[0].submitted[0].params.grammar
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    answer = await create(stack, tools=[TOOL], tool_choice=allowed)
    assert answer.json()["tool_choice"] == allowed
    assert "look" in stack.decode[0].submitted[1].params.grammar
    error = (await create(stack, tools=[TOOL], tool_choice={"type": "function", "name": "x"})).json()["error"]
    assert "names 'x', which is none of the tools" in error["message"]


async def test_a_stream_that_fails_says_so_in_both_ways(stack):
    stack.decode[0].script = failing(GrammarError("too complex"), after=(300,))
    *_, error, failed = await events_of(stack)
    assert (error["type"], error["code"], failed["type"]) == ("error", "invalid_grammar", "response.failed")
    assert (failed["response"]["status"], failed["response"]["usage"]) == ("failed", None)
    assert failed["response"]["error"] == {"code": "invalid_prompt", "message": "too complex"}


async def test_tokens_of_the_prompt_are_counted(stack):
    body = {"model": MODEL, "input": "hello", "instructions": "be brief", "tools": [TOOL]}
    counted = (await stack.client.post(TOKENS, json=body)).json()
    asked = (await create(stack, **body)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": asked["usage"]["input_tokens"]}


BAD_FIELDS = [
    ({"input": None}, "input", "missing or empty"),
    ({"input": []}, "input", "missing or empty"),
    ({"input": 5}, "input", "got 5"),
    ({"input": "word " * MAX_MODEL_LEN}, "input", "shorten"),
    ({"input": [{"role": "nobody", "content": "a"}]}, "input", "input[0].role"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1, got 0"),
    ({"max_output_tokens": 1000}, "max_output_tokens", "max_output_tokens or shorten the input"),
    ({"max_output_tokens": "5"}, "max_output_tokens", "valid integer"),
    ({"temperature": -1}, "temperature", "got -1"),
    ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"top_logprobs": 20, "max_output_tokens": 60_000}, "max_output_tokens", "may have 49932 tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] is 'web_search'"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools", "tools[0] is 'mcp'"),
    ({"tools": [5]}, "tools", "tools[0] is 5"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].name"),
    ({"tools": [TOOL | {"parameters": 5}]}, "tools", "tools[0].parameters must be an object"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "must be 'none'"),
    ({"tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice", "mode"),
    ({"text": {"format": {"type": "xml"}}}, "text", "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "schema"),
    ({"text": {"verbosity": "low"}}, "text", "text.verbosity is not supported here, got 'low'"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning", "reasoning.summary is not supported"),
    ({"include": ["everything"]}, "include", "got 'everything'"),
    (
        {"tools": [TOOL], "tool_choice": "required", "top_logprobs": 1},
        "include",
        "only answers that are text alone",
    ),
    ({"metadata": {"a": 5}}, "metadata", "valid string"),
    ({"metadata": {"a" * 65: "b"}}, "metadata", "has 65 and 1"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "has 1 and 513"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "17 entries"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"background": True}, "background", "not supported"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"prompt": {"id": "a"}}, "prompt", "not supported"),
    ({"n": 2}, "n", "not supported"),
    ({"messages": []}, "messages", "here it is input"),
    ({"max_tokens": 5}, "max_tokens", "here it is max_output_tokens"),
    ({"response_format": {"type": "text"}}, "response_format", "here it is text.format"),
]


async def test_what_is_wrong_is_named_and_the_next_request_served(stack):
    for fields, param, words in BAD_FIELDS:
        for stream in (False, True):
            refused = await create(stack, stream=stream, **fields)
            assert refused.status_code == 400, fields
            error = refused.json()["error"]
            assert error["param"] == param, (fields, error)
            assert words in error["message"], (fields, error)
    assert (await create(stack, model="another")).status_code == 404
    assert not stack.decode[0].submitted
    assert (await create(stack)).status_code == 200


HARMLESS = {
    "background": False,
    "include": ["reasoning.encrypted_content"],
    "max_tool_calls": 3,
    "parallel_tool_calls": True,
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "reasoning": {"summary": "auto"},
    "safety_identifier": "b",
    "service_tier": "flex",
    "store": True,
    "stream_options": {"include_obfuscation": False},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "truncation": "disabled",
    "user": "c",
}


async def test_fields_that_change_nothing_are_taken(stack):
    plain = await events_of(stack)
    events = await events_of(stack, **HARMLESS)
    assert [event["type"] for event in events] == [event["type"] for event in plain]
    response = events[-1]["response"]
    assert (response["store"], response["prompt_cache_key"]) == (False, "a")
    assert response["output"][0]["content"] == plain[-1]["response"]["output"][0]["content"]


async def test_apis_that_are_not_here_are_refused_by_name(stack):
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations"):
        refused = await stack.client.post(path, json={"input": "a"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (404, "unsupported_endpoint")
        assert error["message"].startswith(f"{path} is not supported by this server: ")
