"""``openai-agents`` against a real stack: loops with a tool, by chats and by responses, whole and streamed.

The bundled model calls a tool because ``tool_choice`` asks for it. Once a call was made, the library asks no
longer, and the model's next turn is a text.
"""

from __future__ import annotations

import json
import socket
from typing import Literal

import openai
import pytest
from openai.types.shared import Reasoning
from pydantic import BaseModel, ConfigDict

QUESTIONS = ("Which city, and for how many days?", "And then?")
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
APIS = ("chats", "responses")

pytestmark = pytest.mark.parametrize("api", APIS)


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture
def agents(monkeypatch):
    """The library, without its tracing: it looks up no name but this machine's."""
    import agents

    agents.set_tracing_disabled(True)
    looked_up, look_up = set(), socket.getaddrinfo

    def here(host, *others, **options):
        looked_up.add(host)
        return look_up(host, *others, **options)

    monkeypatch.setattr(socket, "getaddrinfo", here)
    yield agents
    assert looked_up <= LOOPBACK


@pytest.fixture
async def model(agents, agent_stack, api):
    kind = {"chats": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[api]
    async with openai.AsyncOpenAI(base_url=f"{agent_stack.url}/v1", api_key="none", max_retries=0) as client:
        yield kind(model=agent_stack.model, openai_client=client)


@pytest.fixture
def booked():
    """What the tool was called with."""
    return []


@pytest.fixture
def make_agent(agents, model, booked):
    @agents.function_tool
    def book_trip(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Books it."""
        booked.append((city, days))
        return f"{days} days in {city} are booked"

    def make(tool_choice="required", tools=(book_trip,), reasoning=None, **fields):
        settings = agents.ModelSettings(
            temperature=0,
            max_tokens=200,
            include_usage=True,
            tool_choice=tool_choice,
            parallel_tool_calls=False if tool_choice else None,
            reasoning=reasoning,
        )
        named = {"name": "traveller", "instructions": "Be brief."} | fields
        return agents.Agent(model=model, model_settings=settings, tools=list(tools), **named)

    return make


async def run_whole(agents, agent, said):
    return await agents.Runner.run(agent, said, max_turns=6)


async def run_streamed(agents, agent, said):
    """Returns the ended run; checks that each text and each call's arguments are the sum of their deltas."""
    result = agents.Runner.run_streamed(agent, said, max_turns=6)
    pieces = {"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type in pieces:
            pieces[event.data.type] += event.data.delta
    done = [what for what in map(content, result.new_items) if what]
    assert pieces == {
        "response.output_text.delta": "".join(what[1] for what in done if what[0] == "text"),
        "response.function_call_arguments.delta": "".join(what[2] for what in done if what[0] == "call"),
    }
    return result


def content(item):
    """Returns what an item says, without its ids; None if it says nothing of its own."""
    if item.type == "message_output_item":
        return ("text", "".join(part.text for part in item.raw_item.content))
    if item.type in ("tool_call_item", "handoff_call_item"):
        return ("call", item.raw_item.name, item.raw_item.arguments)
    return ("output", item.output) if item.type == "tool_call_output_item" else None


async def converse(run, agents, agent):
    """Asks all questions in one conversation; returns what was said and done, and the tokens of each run."""
    said, done, usages = [], [], []
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        result = await run(agents, agent, said)
        said = result.to_input_list()
        done += map(content, result.new_items)
        usage = result.context_wrapper.usage
        usages.append((usage.requests, usage.input_tokens, usage.output_tokens))
    return done, usages


async def test_an_agent_calls_its_tool_and_answers_streamed_as_whole(agents, agent_stack, make_agent, booked):
    agent = make_agent()
    done, usages = await converse(run_whole, agents, agent)
    assert [what[0] for what in done] == ["call", "output", "text"] * len(QUESTIONS)
    assert len(booked) == len(QUESTIONS)
    for call, output, (city, days) in zip(done[::3], done[1::3], booked, strict=True):
        assert (call[1], json.loads(call[2])) == ("book_trip", {"city": city, "days": days})
        assert output == ("output", f"{days} days in {city} are booked")
    assert all(text for _, text in done[2::3])
    assert [requests for requests, _, _ in usages] == [2, 2]
    assert await converse(run_streamed, agents, agent) == (done, usages)
    assert booked[len(QUESTIONS) :] == booked[: len(QUESTIONS)]
    agent_stack.wait_until(agent_stack.is_idle, "nothing is left behind")


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", [run_whole, run_streamed])
async def test_a_loop_goes_on_as_long_as_the_agent_wants(agents, make_agent, booked, run):
    def until_three(_context, results):
        return agents.ToolsToFinalOutputResult(
            is_final_output=len(booked) == 3, final_output=results[0].output
        )

    agent = make_agent("book_trip", reset_tool_choice=False, tool_use_behavior=until_three)
    result = await run(agents, agent, QUESTIONS[0])
    assert [what[0] for what in map(content, result.new_items)] == ["call", "output"] * 3
    assert len(booked) == 3
    assert result.final_output == "{1} days in {0} are booked".format(*booked[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", [run_whole, run_streamed])
async def test_an_agent_answers_with_an_object(agents, make_agent, run):
    not_thinking = Reasoning(effort="none")
    agent = make_agent(None, tools=(), reasoning=not_thinking, output_type=Trip)
    assert isinstance((await run(agents, agent, QUESTIONS[0])).final_output, Trip)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", [run_whole, run_streamed])
async def test_an_agent_hands_over_to_another(agents, make_agent, booked, run):
    clerk = make_agent(name="clerk")
    desk = make_agent("transfer_to_clerk", tools=(), name="desk", handoffs=[clerk])
    result = await run(agents, desk, QUESTIONS[0])
    assert result.last_agent.name == "clerk"
    assert len(booked) == 1
