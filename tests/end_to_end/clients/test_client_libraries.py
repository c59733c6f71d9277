"""Client libraries of applications against a real stack: the ``openai`` SDK, langchain-openai, litellm and
instructor.

Each asks for a chat, a stream, tools and an object of a schema, in its own way of asking.
"""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

MESSAGES = [{"role": "user", "content": "Which city, and for how many days?"}]
ANSWER = {"max_tokens": 12, "temperature": 0}
ENOUGH = {"max_tokens": 200, "temperature": 0}


class Trip(BaseModel):
    """Where to go."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3] = Field(description="how long")


TOOL = {
    "type": "function",
    "function": {"name": "book_trip", "description": "Books it.", "parameters": Trip.model_json_schema()},
}


@pytest.fixture
def stack(stacks):
    return stacks("up", "--max-num-seqs", "16")


@pytest.fixture
def expected(stack):
    """The answer that all should get."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        chat = client.chat.completions.create(model=stack.model, messages=MESSAGES, **ANSWER)
    return chat.choices[0].message.content


# --- openai ----------------------------------------------------------------------------------------


@pytest.fixture
async def client(stack):
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as made:
        yield made


async def test_openai_streams_what_it_gets_whole(stack, client, expected):
    async with client.chat.completions.stream(model=stack.model, messages=MESSAGES, **ANSWER) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_completion()).choices[0].message.content == expected


async def test_openai_parses_an_object_of_a_schema(stack, client):
    chat = await client.chat.completions.parse(
        model=stack.model, messages=MESSAGES, response_format=Trip, **ENOUGH
    )
    assert isinstance(chat.choices[0].message.parsed, Trip)


async def test_openai_gets_a_call_of_a_tool(stack, client):
    fields = {"model": stack.model, "messages": MESSAGES, "tools": [TOOL]}
    chat = await client.chat.completions.create(
        **fields, **ENOUGH, tool_choice="required", parallel_tool_calls=False
    )
    (choice,) = chat.choices
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "book_trip"
    Trip.model_validate_json(call.function.arguments)
    turn = [*MESSAGES, choice.message.model_dump(exclude_none=True)]
    turn += [
        {"role": "tool", "tool_call_id": call.id, "content": "booked"} for call in choice.message.tool_calls
    ]
    chat = await client.chat.completions.create(model=stack.model, messages=turn, tools=[TOOL], **ANSWER)
    assert chat.choices[0].finish_reason is not None


# --- langchain-openai ------------------------------------------------------------------------------


@pytest.fixture
def chat_model(stack):
    from langchain_openai import ChatOpenAI

    return lambda **fields: ChatOpenAI(
        base_url=f"{stack.url}/v1", model=stack.model, api_key="none", max_retries=0, **fields
    )


def test_langchain_chats_and_streams(chat_model, expected):
    model = chat_model(**ANSWER)
    message = model.invoke("Which city, and for how many days?")
    assert message.content == expected
    assert 0 < message.usage_metadata["output_tokens"] <= 12
    chunks = list(model.stream("Which city, and for how many days?"))
    assert "".join(chunk.content for chunk in chunks) == expected
    assert any(chunk.response_metadata.get("finish_reason") for chunk in chunks)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_an_object_of_a_schema(chat_model, method):
    trip = chat_model(**ENOUGH).with_structured_output(Trip, method=method).invoke("Which city?")
    assert isinstance(trip, Trip)


def test_langchain_gets_a_call_of_a_tool(chat_model):
    message = chat_model(**ENOUGH).bind_tools([TOOL], tool_choice="book_trip").invoke("Which city?")
    (call,) = message.tool_calls
    assert call["name"] == "book_trip"
    Trip.model_validate(call["args"])


# --- litellm ---------------------------------------------------------------------------------------


@pytest.fixture
def complete(stack, monkeypatch):
    monkeypatch.setenv(
        "LITELLM_LOCAL_MODEL_COST_MAP", "True"
    )  # it fetches a list from the internet otherwise
    import litellm

    def complete(**fields):
        return litellm.completion(
            model=f"openai/{stack.model}",
            api_base=f"{stack.url}/v1",
            api_key="none",
            num_retries=0,
            messages=MESSAGES,
            **fields,
        )

    return complete


def test_litellm_chats_and_streams(complete, expected):
    assert complete(**ANSWER).choices[0].message.content == expected
    pieces = [chunk.choices[0].delta.content or "" for chunk in complete(**ANSWER, stream=True)]
    assert "".join(pieces) == expected


def test_litellm_gets_an_object_of_a_schema(complete):
    schema = {"name": "trip", "schema": Trip.model_json_schema(), "strict": True}
    answer = complete(**ENOUGH, response_format={"type": "json_schema", "json_schema": schema})
    assert Trip.model_validate_json(answer.choices[0].message.content)
    anything = complete(**ENOUGH, response_format={"type": "json_object"}).choices[0]
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.message.content), dict)


def test_litellm_gets_a_call_of_a_tool(complete):
    choice = {"type": "function", "function": {"name": "book_trip"}}
    (call,) = complete(**ENOUGH, tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls
    assert call.function.name == "book_trip"
    Trip.model_validate_json(call.function.arguments)


# --- instructor ------------------------------------------------------------------------------------


@pytest.fixture
def extract(stack):
    """Asks in a mode, by its name."""
    instructor = pytest.importorskip(
        "instructor", reason="`make` installs it on its own: it declares an older jiter than openai needs"
    )
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:

        def extract(mode, method="create"):
            made = instructor.from_openai(client, mode=instructor.Mode[mode])
            fields = {"model": stack.model, "messages": MESSAGES, "max_retries": 0, "response_model": Trip}
            return getattr(made.chat.completions, method)(**fields, **ENOUGH)

        yield extract


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", pytest.param("TOOLS", marks=pytest.mark.exhaustive)])
def test_instructor_gets_an_object_and_its_parts_as_they_come(extract, mode):
    trip = extract(mode)
    assert isinstance(trip, Trip)
    parts = [part.model_dump() for part in extract(mode, "create_partial")]
    assert parts[-1] == trip.model_dump()
    assert len({str(part) for part in parts}) > 1
