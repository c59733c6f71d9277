"""The ``anthropic`` Python client against a real stack: what works, what is refused, loops with tools."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import httpx
import pytest
from pydantic import BaseModel, ConfigDict

from testing.router.message_events import message_of, read_events

QUESTION = [{"role": "user", "content": "Which city, and for how many days?"}]
ANSWER = {"max_tokens": 12, "extra_body": {"temperature": 0}}
ENOUGH = {"max_tokens": 200, "extra_body": {"temperature": 0}}
EPHEMERAL = {"type": "ephemeral"}


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


TOOL = {"name": "book_trip", "description": "Books it.", "input_schema": Trip.model_json_schema()}
CALL = {"type": "tool_use", "id": "call_1", "name": "book_trip", "input": {"city": "Rome", "days": 2}}
FORMAT = {"type": "json_schema", "schema": Trip.model_json_schema()}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def turns(*contents: Any) -> dict[str, Any]:
    """Returns messages of the user and the assistant in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": said} for i, said in enumerate(contents)]}


def result(**fields: Any) -> dict[str, Any]:
    return turns("Rome", [CALL], [{"type": "tool_result", "tool_use_id": "call_1", **fields}])


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
THOUGHT = {"type": "thinking", "thinking": "Rome?", "signature": "unsigned"}
REDACTED = {"type": "redacted_thinking", "data": "AA=="}

WORKS, REFUSED = "works", "invalid_request_error"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PROMPTS = {
    "messages: text": (turns("Rome"), WORKS),
    "messages: text blocks": (turns([text("Rome"), text("or Paris?")]), WORKS),
    "messages: several turns": (turns("Rome", "Yes?", [text("When?")]), WORKS),
    "messages: system role": ({"messages": [*QUESTION, {"role": "system", "content": "Be brief."}]}, WORKS),
    "messages: tool_use, tool_result": (result(content="booked"), WORKS),
    "messages: tool_result blocks": (result(content=[text("booked")]), WORKS),
    "messages: tool_result is_error": (result(content="no room", is_error=True), WORKS),
    "messages: thinking": (turns("Rome", [THOUGHT, REDACTED, text("Yes?")], "When?"), WORKS),
    "messages: image": (turns([IMAGE, text("What is this?")]), REFUSED),
    "messages: document": (turns([DOCUMENT, text("What is this?")]), REFUSED),
    "messages: tool_result image": (result(content=[IMAGE]), REFUSED),
    "messages: begun answer": (turns("Rome", "The best"), REFUSED),
    "system: text": ({"system": "Be brief."}, WORKS),
    "system: text blocks": ({"system": [text("Be brief.", cache_control=EPHEMERAL)]}, WORKS),
    "cache_control": ({"cache_control": {**EPHEMERAL, "ttl": "1h"}}, WORKS),
    "cache_control: 5 marks": (turns([text("Rome", cache_control=EPHEMERAL)] * 5), REFUSED),
    "tools: custom": ({"tools": [TOOL]}, WORKS),
    "tools: server tools": ({"tools": [SEARCH]}, REFUSED),
    "tool_choice: auto": ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, WORKS),
    "tool_choice: none": ({"tools": [TOOL], "tool_choice": {"type": "none"}}, WORKS),
    "tool_choice: without tools": ({"tool_choice": {"type": "any"}}, REFUSED),
    "thinking: disabled": ({"thinking": {"type": "disabled"}}, WORKS),
    "thinking: adaptive": ({"thinking": {"type": "adaptive"}}, WORKS),
    "output_config: effort": ({"output_config": {"effort": "low"}}, WORKS),
    "model: unknown": ({"model": "another"}, "not_found_error"),
}
"""What prompts are made from: a request's fields, and whether they work."""
ANSWERS = {
    "max_tokens": ({"max_tokens": 5}, WORKS),
    "max_tokens: 0": ({"max_tokens": 0}, REFUSED),
    "max_tokens: above the context": ({"max_tokens": 20_000}, REFUSED),
    "stop_sequences": ({"stop_sequences": ["\n", "e"]}, WORKS),
    "metadata": ({"metadata": {"user_id": "u"}}, WORKS),
    "service_tier": ({"service_tier": "auto"}, WORKS),
    "temperature, top_p, top_k": ({"extra_body": {"temperature": 0, "top_p": 0.9, "top_k": 40}}, WORKS),
    "tool_choice: any": (ENOUGH | {"tools": [TOOL], "tool_choice": {"type": "any"}}, WORKS),
    "tool_choice: tool": (
        ENOUGH | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "book_trip"}},
        WORKS,
    ),
    "tool_choice: disable_parallel_tool_use": (
        ENOUGH | {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        WORKS,
    ),
    "output_config: format": (ENOUGH | {"output_config": {"format": FORMAT}}, WORKS),
    "container": ({"container": "c"}, REFUSED),
    "thread": ({"extra_body": {"thread": {"type": "create"}}}, REFUSED),
}
"""What says how the answer is made."""
ROWS = [
    *((MESSAGES, field, "anthropic", outcome) for field, (_, outcome) in (PROMPTS | ANSWERS).items()),
    *((COUNT, field, "anthropic", outcome) for field, (_, outcome) in PROMPTS.items()),
]
"""Endpoint, field, client, and whether it works or with which error it is refused."""


@pytest.fixture
def stack(stacks):
    return stacks("up", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def http(stacks):
    """One client of HTTP for all tests: each new one reads all of the machine's certificates."""
    stacks("up", "--max-num-seqs", "16")  # before the client, which trusts the authorities of now
    with anthropic.DefaultHttpxClient() as made:
        yield made


@pytest.fixture
def client(stack, http):
    return anthropic.Anthropic(base_url=stack.url, api_key="none", http_client=http, max_retries=0)


def plain(message: anthropic.types.Message) -> dict[str, Any]:
    """Returns a message without what differs from answer to answer: ids, and what was cached."""
    said: dict[str, Any] = json.loads(message.model_dump_json(exclude={"id", "usage"}, exclude_none=True))
    for block in said["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    usage = message.usage
    read = usage.cache_read_input_tokens
    assert read is not None
    return said | {"prompt": usage.input_tokens + read, "answer": usage.output_tokens}


@pytest.mark.parametrize(("endpoint", "field", "of", "outcome"), ROWS)
def test_each_field_works_or_is_refused(stack, client, endpoint, field, of, outcome):
    fields, _ = (PROMPTS | ANSWERS)[field]
    asked = {"model": stack.model, "messages": QUESTION} | fields
    if endpoint == MESSAGES:
        asked = ANSWER | asked
    ask = client.messages.create if endpoint == MESSAGES else client.messages.count_tokens
    if outcome != WORKS:
        with pytest.raises(anthropic.APIStatusError) as refused:
            ask(**asked)
        assert refused.value.body["error"]["type"] == outcome
        assert refused.value.request_id == refused.value.body["request_id"]
        return
    answer = ask(**asked)
    if endpoint == COUNT:
        assert answer.input_tokens > 0
        return
    assert answer._request_id
    with client.messages.stream(**asked) as stream:
        assert plain(stream.get_final_message()) == plain(answer)
    if fields.get("tool_choice", {}).get("type") in ("any", "tool"):
        assert answer.stop_reason in ("tool_use", "max_tokens")  # nothing ends a model's calls but itself
        Trip.model_validate(answer.content[0].input)


def test_an_answer_is_the_chats(stack, client):
    """The same greedy tokens, whichever API asks."""
    message = client.messages.create(model=stack.model, messages=QUESTION, **ANSWER)
    body = {"model": stack.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    chat = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60).json()
    assert message.content[0].text == chat["choices"][0]["message"]["content"]
    assert plain(message)["prompt"] == chat["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(model=stack.model, messages=QUESTION)
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_loop_with_tools_goes_over_several_turns(stack, client):
    messages: list[Any] = list(QUESTION)
    for choice in ({"type": "any"}, {"type": "tool", "name": "book_trip"}, {"type": "none"}):
        asked = {"model": stack.model, "messages": messages, "tools": [TOOL], "tool_choice": choice}
        with client.messages.stream(**asked, **ENOUGH) as stream:
            answer = stream.get_final_message()
        assert plain(answer) == plain(client.messages.create(**asked, **ENOUGH))
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"booked: {call.input['city']}"}
            for call in calls
        ]
        assert bool(results) == (choice["type"] != "none")
        messages.append({"role": "user", "content": results or "Thanks."})
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert len(messages) == 7


def test_an_answer_of_a_schema_is_parsed(stack, client):
    parsed = client.messages.parse(model=stack.model, messages=QUESTION, output_format=Trip, **ENOUGH)
    assert isinstance(parsed.parsed_output, Trip)


def test_the_clients_own_loop_calls_functions(stack, client):
    booked = []

    @anthropic.beta_tool
    def book_trip(city: str, days: int) -> str:
        """Books a trip."""
        booked.append((city, days))
        return "booked"

    runner = client.beta.messages.tool_runner(
        model=stack.model,
        messages=QUESTION,
        tools=[book_trip],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        thread=False,  # the server keeps no messages
        **ENOUGH,
    )
    answers = list(runner)
    assert len(answers) == 2
    assert booked


def test_the_models_are_listed(stack, client):
    assert stack.model in [model.id for model in client.models.list()]


def test_a_raw_stream_has_all_its_events_in_order(stack):
    body = {"model": stack.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = httpx.post(f"{stack.url}/v1/messages", json=body, timeout=60).json()
    stream = httpx.post(f"{stack.url}/v1/messages", json=body | {"stream": True}, timeout=60).text
    assert message_of(read_events(stream))["content"] == whole["content"]
