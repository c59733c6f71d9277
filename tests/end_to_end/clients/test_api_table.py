"""Each line of the tables of docs/api.md is so: official clients send it to a real stack."""

from __future__ import annotations

import inspect

import openai
import pytest

from router.api.openai.chat import ChatBody
from router.api.openai.completions import CompletionBody
from testing.api_facts.fact import WORKS
from testing.api_table import ENDPOINTS, facts

BODIES = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
FACTS = [pytest.param(*one, id=f"{one[0].path} {one[1].name}") for one in facts()]


@pytest.fixture(scope="module")
def http():
    """One client of HTTP for all tests: each new one reads all of the machine's certificates."""
    with openai.DefaultHttpxClient() as made:
        yield made


@pytest.fixture
def client(agent_stack, http):
    return openai.OpenAI(base_url=f"{agent_stack.url}/v1", api_key="none", http_client=http, max_retries=0)


def sent(client, path, fields):
    """Sends a request and reads the answer, streamed or not, to its end. What the client has no parameter for
    goes in its ``extra_body``."""
    create = {
        "/v1/completions": client.completions.create,
        "/v1/chat/completions": client.chat.completions.create,
    }[path]
    known = inspect.signature(create).parameters
    extra = {name: value for name, value in fields.items() if name not in known}
    given = {name: value for name, value in fields.items() if name in known}
    answer = create(**given, extra_body=extra)
    if not fields.get("stream"):
        return [choice for choice in answer.choices if choice.finish_reason]
    with answer:
        return [choice for chunk in answer for choice in chunk.choices if choice.finish_reason]


@pytest.mark.parametrize(("endpoint", "fact"), FACTS)
def test_a_field_does_what_the_table_says(agent_stack, client, endpoint, fact):
    fields = endpoint.request(fact, agent_stack.model)
    if fact.outcome == WORKS:
        assert sent(client, endpoint.path, fields)
        return
    with pytest.raises(openai.APIStatusError) as refused:
        sent(client, endpoint.path, fields)
    error = refused.value
    assert f"{error.status_code} {error.code}" == fact.outcome, error
    assert error.param == fact.field


def test_nothing_is_left_behind(agent_stack):
    agent_stack.wait_until(agent_stack.is_idle, "nothing is left behind")


@pytest.mark.parametrize(
    "endpoint", [one for one in ENDPOINTS if one.path in BODIES], ids=lambda one: one.path
)
def test_every_field_is_in_the_table(endpoint):
    body = BODIES[endpoint.path]
    in_table = {fact.field for fact in endpoint.facts}
    assert not (body.model_fields.keys() | body.unsupported.keys()) - in_table


def test_each_fact_is_there_once():
    names = [(endpoint.path, fact.name) for endpoint, fact in facts()]
    assert len(set(names)) == len(names)
