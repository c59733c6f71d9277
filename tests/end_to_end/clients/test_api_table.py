"""Each line of the tables of docs/api.md is so: official clients send it to a real stack."""

from __future__ import annotations

import inspect

import anthropic
import openai
import pytest

from router.api.anthropic.message_body import CountBody, MessageBody
from router.api.openai.chat import ChatBody
from router.api.openai.completions import CompletionBody
from router.api.responses.body import ResponseBody
from testing.api_facts.fact import WORKS
from testing.api_facts.messages import COUNT
from testing.api_table import ENDPOINTS, facts

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessageBody,
    "/v1/messages/count_tokens": CountBody,
}
FACTS = [pytest.param(*one, id=f"{one[0].path} {one[1].name}") for one in facts()]


@pytest.fixture(scope="module")
def http(running_agent):
    """One client of HTTP for all tests: each new one reads all of the machine's certificates."""
    running_agent()
    with openai.DefaultHttpxClient() as made:
        yield made


@pytest.fixture(scope="module")
def anthropic_http(running_agent):
    running_agent()
    with anthropic.DefaultHttpxClient() as made:
        yield made


@pytest.fixture
def calls(agent_stack, http, anthropic_http):
    """The official client's method for each endpoint."""
    given = {"api_key": "none", "max_retries": 0}
    theirs = openai.OpenAI(base_url=f"{agent_stack.url}/v1", http_client=http, **given)
    other = anthropic.Anthropic(base_url=agent_stack.url, http_client=anthropic_http, **given)
    return {
        "/v1/completions": theirs.completions.create,
        "/v1/chat/completions": theirs.chat.completions.create,
        "/v1/responses": theirs.responses.create,
        "/v1/messages": other.messages.create,
        "/v1/messages/count_tokens": other.messages.count_tokens,
    }


def sent(create, fields):
    """Sends a request and reads the answer, streamed or not, to its end. Returns what shows that it is whole.
    What the client has no parameter for goes in its ``extra_body``."""
    known = inspect.signature(create).parameters
    extra = {name: value for name, value in fields.items() if name not in known}
    given = {name: value for name, value in fields.items() if name in known}
    answer = create(**given, extra_body=extra)
    if not fields.get("stream"):
        return ends_in(answer)
    with answer:
        return [end for event in answer for end in ends_in(event)]


def ends_in(answer):
    """Why it ended, of an answer or an event that has its end; the number of tokens, of a count."""
    if hasattr(answer, "choices"):
        return [choice.finish_reason for choice in answer.choices if choice.finish_reason]
    answer = getattr(answer, "response", None) or getattr(answer, "delta", None) or answer
    names = ("status", "stop_reason", "input_tokens")
    found = [getattr(answer, name, None) for name in names]
    return [end for end in found if end not in (None, "in_progress")]


@pytest.mark.parametrize(("endpoint", "fact"), FACTS)
def test_a_field_does_what_the_table_says(agent_stack, calls, endpoint, fact):
    fields = endpoint.request(fact, agent_stack.model)
    if fact.outcome == WORKS:
        assert sent(calls[endpoint.path], fields)
        return
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as refused:
        sent(calls[endpoint.path], fields)
    error = refused.value
    if isinstance(error, openai.APIStatusError):
        assert f"{error.status_code} {error.code}" == fact.outcome, error
        assert error.param == fact.field
    else:
        assert f"{error.status_code} {error.body['error']['type']}" == fact.outcome, error


def test_nothing_is_left_behind(agent_stack):
    agent_stack.wait_until(agent_stack.is_idle, "nothing is left behind")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: one.path)
def test_every_field_is_in_the_table(endpoint):
    body = BODIES[endpoint.path]
    in_table = {fact.field for fact in endpoint.facts}
    if endpoint is COUNT:
        in_table |= {"stream", "output_format"}  # it ignores the one, and the client refuses the other
    assert not (body.model_fields.keys() | body.unsupported.keys()) - in_table


def test_each_fact_is_there_once():
    names = [(endpoint.path, fact.name) for endpoint, fact in facts()]
    assert len(set(names)) == len(names)
