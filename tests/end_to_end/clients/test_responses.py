"""``/v1/responses`` and the official ``openai`` client, against a real stack. Two router processes share a
store."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

RESPONSES, TOKENS = "/v1/responses", "/v1/responses/input_tokens"
CREATE, STREAM = "responses.create", "responses.stream"
SHORT = {"max_output_tokens": 12, "temperature": 0}
ENOUGH = {"max_output_tokens": 200, "temperature": 0}
FORCED = {"tool_choice": "required", "parallel_tool_calls": False}


class Trip(BaseModel):
    """Where to go."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


TOOL = {
    "type": "function",
    "name": "book_trip",
    "description": "Books it.",
    "parameters": Trip.model_json_schema(),
    "strict": True,
}
CALL = {"type": "function_call", "call_id": "call_1", "name": "book_trip", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "booked"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
SCHEMA = {"type": "json_schema", "name": "trip", "schema": Trip.model_json_schema(), "strict": True}

VALUES = {
    "input": "hello",
    "input: items": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "input: calls": [{"role": "user", "content": "book"}, CALL, OUTPUT],
    "input: reasoning": [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "a"},
    ],
    "input: image": [{"role": "user", "content": [IMAGE]}],
    "input: item_reference": [{"type": "item_reference", "id": "msg_1"}],
    "instructions": "be brief",
    "background": True,
    "conversation": "conv_1",
    "include": ["message.output_text.logprobs"],
    "include: encrypted": ["reasoning.encrypted_content"],
    "max_output_tokens": 3,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "metadata: too many": {str(i): "" for i in range(17)},
    "parallel_tool_calls": False,
    "previous_response_id": "resp_nobody",
    "prompt": {"id": "pmpt_1"},
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "reasoning: summary": {"summary": "detailed"},
    "safety_identifier": "a",
    "service_tier": "auto",
    "store": False,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "text: json_object": {"format": {"type": "json_object"}},
    "text: json_schema": {"format": SCHEMA},
    "text: verbosity": {"verbosity": "low"},
    "tool_choice": "none",
    "tools": [TOOL],
    "tools: web_search": [{"type": "web_search"}],
    "tools: mcp": [{"type": "mcp", "server_label": "a", "server_url": "https://a.invalid"}],
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "disabled",
    "truncation: auto": "auto",
    "user": "a",
    "extra_body": {"top_k": 5, "seed": 3, "ignore_eos": True, "repetition_penalty": 1.1, "min_p": 0.1},
}
REFUSED = {
    "input: image": "invalid_value",
    "input: item_reference": "invalid_value",
    "background": "invalid_value",
    "conversation": "invalid_value",
    "metadata: too many": "invalid_value",
    "previous_response_id": "previous_response_not_found",
    "prompt": "invalid_value",
    "reasoning: summary": "invalid_value",
    "text: verbosity": "invalid_value",
    "tools: web_search": "invalid_value",
    "tools: mcp": "invalid_value",
    "truncation: auto": "invalid_value",
}
ROWS = [
    (RESPONSES, field, client, REFUSED.get(field, "works")) for client in (CREATE, STREAM) for field in VALUES
]
"""Endpoint, field, call of the ``openai`` client, and whether it works or with which code it is refused."""


@pytest.fixture(scope="module")
def stack(module_stacks, tmp_path_factory):
    file = tmp_path_factory.mktemp("store") / "responses"
    return module_stacks("up", "--max-num-seqs", "16", "--workers", "2", "--response-store", str(file))


@pytest.fixture
async def client(stack):
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def streamed(client, **fields):
    """The response that the client puts together, and the texts of its deltas."""
    texts = {"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
    async with client.responses.stream(**fields) as stream:
        async for event in stream:
            if event.type in texts:
                texts[event.type] += event.delta
            last = event
    return last.response, *texts.values()


def comparable(response):
    """All but what differs between two equal requests: ids, times and what was cached."""
    plain = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        plain.pop(name)
    plain["usage"].pop("input_tokens_details")
    for item in plain["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return plain


@pytest.mark.parametrize(("endpoint", "field", "call", "outcome"), ROWS, ids=lambda value: str(value))
async def test_each_field_works_or_is_refused_by_name(stack, client, endpoint, field, call, outcome):
    name = field.partition(":")[0]
    fields = {"model": stack.model, "input": "hello", "max_output_tokens": 4} | {name: VALUES[field]}
    if name == "tool_choice":
        fields["tools"] = [TOOL]
    asked = client.responses.create(**fields) if call == CREATE else streamed(client, **fields)
    if outcome == "works":
        answered = await asked
        response = answered if call == CREATE else answered[0]
        assert response.status in ("completed", "incomplete")
        assert response.output
        return
    with pytest.raises(openai.BadRequestError) as refused:
        await asked
    assert (refused.value.code, refused.value.param) == (outcome, name)


@pytest.mark.parametrize("field", ["text", "tools", "logprobs"])
async def test_a_stream_put_together_is_the_whole_answer(stack, client, field):
    fields = {
        "model": stack.model,
        "input": "Which city?",
        "instructions": "Answer.",
        **SHORT,
        "store": False,
    }
    if field == "tools":
        fields |= {"tools": [TOOL], **FORCED, **ENOUGH}
    if field == "logprobs":
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await client.responses.create(**fields)
    response, text, arguments = await streamed(client, **fields)
    assert comparable(response) == comparable(whole)
    assert text == whole.output_text
    assert field != "tools" or arguments == whole.output[-1].arguments
    if field == "logprobs":
        (message,) = whole.output
        tokens = b"".join(bytes(one.bytes) for one in message.content[0].logprobs)
        assert tokens.decode().startswith(whole.output_text)


async def test_it_is_the_chat_of_the_same_messages(stack, client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    chat = await client.chat.completions.create(
        model=stack.model, messages=messages, max_tokens=12, temperature=0
    )
    response = await client.responses.create(
        model=stack.model, instructions="Be brief.", input="What is 3 + 4?", **SHORT
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    count = await client.responses.input_tokens.count(
        model=stack.model, instructions="Be brief.", input="What is 3 + 4?"
    )
    assert count.input_tokens == chat.usage.prompt_tokens


async def test_an_answer_is_parsed_and_a_call_is_made_and_answered(stack, client):
    fields = {"model": stack.model, "input": "Which city, and for how many days?"}
    parsed = await client.responses.parse(**fields, text_format=Trip, **ENOUGH)
    assert isinstance(parsed.output_parsed, Trip)
    called = await client.responses.create(**fields, tools=[TOOL], **FORCED, **ENOUGH)
    call = called.output[-1]
    Trip.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"ok": True})}
    sent = [{"role": "user", "content": fields["input"]}, *called.output, output]
    by_items = await client.responses.create(model=stack.model, input=sent, tools=[TOOL], **SHORT)
    by_id = await client.responses.create(
        model=stack.model, previous_response_id=called.id, input=[output], tools=[TOOL], **SHORT
    )
    assert by_id.output_text == by_items.output_text
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_found_continued_and_deleted_at_once(stack, client, stream):
    """Each call may reach another process of the router."""
    fields = {"model": stack.model, **SHORT}
    last = None
    for turn in range(4):
        asked = fields | {"input": f"turn {turn}", "previous_response_id": last and last.id}
        last = (await streamed(client, **asked))[0] if stream else await client.responses.create(**asked)
        found = await client.responses.retrieve(last.id)
        assert comparable(found) == comparable(last)
    page = await client.responses.input_items.list(last.id, order="asc", limit=3)
    items = [item async for item in page]
    assert [item.role for item in items] == ["user", "assistant"] * 3 + ["user"]
    assert [item.content[0].text for item in items[::2]] == [f"turn {turn}" for turn in range(4)]
    with pytest.raises(openai.BadRequestError, match="can be cancelled"):
        await client.responses.cancel(last.id)
    await client.responses.delete(last.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no response"):
            await call(last.id)
    with pytest.raises(openai.BadRequestError, match="never was, or was deleted"):
        await client.responses.create(**fields, input="a", previous_response_id=last.id)
    not_kept = await client.responses.create(**fields, input="a", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(not_kept.id)


async def test_what_is_not_here_is_refused_at_once(client):
    with pytest.raises(openai.NotFoundError, match="embeds or ranks"):
        await client.embeddings.create(model="a", input="a")
