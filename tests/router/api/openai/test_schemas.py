"""The served OpenAPI document is true: what it allows is answered as it says, never by a 5xx.

Random examples of every endpoint show the latter. Bodies written by hand get those answers that random ones
do not.
"""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from testing.conditions import TIMEOUT_S
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import saying
from testing.router.tokenizers import EOS

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
NUM_EXAMPLES = 25
USER = {"role": "user", "content": "hello"}
RIGHT = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/sessions/retain": {"session_id": "chat-17", "seconds": 60},
    "/v1/sessions/release": {"session_id": "chat-17"},
    "/v1/sessions/prefetch": {"session_id": "chat-17"},
    "/v1/sessions/fork": {"session_id": "chat-17", "new_session_id": "chat-18"},
}
"""What examples lack that nearly never get to an answer by chance."""
MOST_FIELDS = 2
"""So many other fields of an example are kept: more would hardly ever be right together."""


def try_operation(operation, headers: dict[str, str]) -> int:
    """Sends examples; returns how many were no errors."""
    accepted = 0

    @seed(1)
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), data=st.data())
    def send(case, data) -> None:
        nonlocal accepted
        right = RIGHT.get(operation.path)
        if right is not None and isinstance(case.body, dict) and data.draw(st.integers(0, 2)):
            fields = sorted(case.body.keys() - right.keys() - {"model"})
            kept = data.draw(st.sets(st.sampled_from(fields), max_size=MOST_FIELDS)) if fields else ()
            case.body = {name: case.body[name] for name in kept} | right
        response = case.call(headers=headers, timeout=TIMEOUT_S)
        case.validate_response(response, checks=CHECKS)
        accepted += response.status_code == 200

    send()
    return accepted


def try_all(url: str, headers: dict[str, str], *, prefix: str = "/") -> dict[str, int]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    return {
        f"{operation.method.upper()} {operation.path}": try_operation(operation, headers)
        for operation in operations
        if operation.path.startswith(prefix) and not operation.path.endswith("/events")  # those never end
    }


async def test_nothing_that_the_document_allows_is_a_server_error(make_stack):
    stack = await make_stack(role="both", num_prefill=0)
    stack.decode[0].script = saying([300, 301, 302])
    accepted = await asyncio.to_thread(try_all, stack.url, {})
    assert accepted.keys() >= {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"}
    posts = [f"POST {path}" for path in RIGHT]
    assert all(accepted[name] for name in (*posts, "GET /v1/models", "GET /metrics")), accepted


# Hardly a random body is a conversation that a model could answer, so some are written by hand.

THINKS = {"chat_template": "{{ messages[-1].content }}<think>\n"}
SAID = 'Rome?</think>I look.<tool_call>{"name": "look", "arguments": {"at": "Rome"}}</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]
LOOK = {"name": "look", "description": "Looks."}
PLACE = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"type": "function", "function": LOOK | {"parameters": PLACE}}
TURNS = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "text", "text": "Where?"}]},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
]
VALID_BODIES = {
    "/v1/completions": (
        {"prompt": "hello"},
        {"prompt": ["hello", "hello"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 4},
    ),
    "/v1/chat/completions": (
        {"messages": HELLO},
        {"messages": TURNS, "n": 2, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4},
        {"messages": HELLO, "tools": [FUNCTION], "tool_choice": "auto"},
    ),
    "/v1/responses": (
        {"input": "hello"},
        {"input": HELLO, "instructions": "be brief", "max_output_tokens": 4, "metadata": {"a": "b"}},
        {"input": TURNS[:1], "tools": [{"type": "function", **LOOK, "parameters": PLACE, "strict": False}]},
    ),
    "/v1/messages": (
        {"messages": HELLO, "max_tokens": 120},
        {"messages": TURNS, "max_tokens": 4, "system": "be brief", "thinking": {"type": "adaptive"}},
        {"messages": HELLO, "max_tokens": 120, "tools": [LOOK | {"input_schema": PLACE}]},
    ),
}
LAST_EVENTS = {
    "/v1/completions": {"[DONE]"},
    "/v1/chat/completions": {"[DONE]"},
    "/v1/responses": {"response.completed", "response.incomplete"},
    "/v1/messages": {"message_stop"},
}


@pytest.fixture
async def thinking_stack(make_stack, words):
    """Each answer has thinking and text, and a call of a tool if the request has tools."""
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    stack = await make_stack(role="both", num_prefill=0, tokenizer_settings=THINKS, **parsers)
    stack.decode[0].script = saying([*words.encode_now(SAID), EOS], ends=True)
    return stack


@pytest.mark.parametrize("path", VALID_BODIES)
async def test_a_valid_body_gets_the_answer_that_the_document_describes(thinking_stack, path):
    document = (await thinking_stack.client.get("/openapi.json")).json()
    described = document["paths"][path]["post"]
    content = described["responses"]["200"]["content"]
    components = {"components": document["components"]}
    for schema in document["components"]["schemas"].values():  # a field that is not described is a fault
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    for fields in VALID_BODIES[path]:
        body = {"model": MODEL} | fields
        jsonschema.validate(
            body, described["requestBody"]["content"]["application/json"]["schema"] | components
        )
        whole = await thinking_stack.client.post(path, json=body)
        assert (whole.status_code, whole.headers["content-type"]) == (200, "application/json"), whole.text
        jsonschema.validate(whole.json(), content["application/json"]["schema"] | components)
        if "tools" in body:
            assert '"look"' in whole.text
        streamed = await thinking_stack.client.post(path, json=body | {"stream": True})
        assert streamed.status_code == 200, streamed.text
        assert streamed.headers["content-type"].partition(";")[0] in content
        last = streamed.text.rstrip().rpartition("data: ")[2]
        name = last if last == "[DONE]" else json.loads(last)["type"]
        assert name in LAST_EVENTS[path]
        assert f"`{name}`" in content["text/event-stream"]["schema"]["description"]


@pytest.mark.exhaustive
async def test_the_same_of_the_admin_api(make_stack, tmp_path):
    (tmp_path / "token").write_text("t" * 40)
    stack = await make_stack(role="both", num_prefill=0, admin_token_file=tmp_path / "token")
    headers = {"Authorization": f"Bearer {'t' * 40}"}
    accepted = await asyncio.to_thread(try_all, stack.url, headers, prefix="/admin")
    assert accepted["GET /admin/v1/workers"]


async def test_the_document_has_no_reference_that_leads_nowhere(make_stack):
    stack = await make_stack(ready=False)
    document = (await stack.client.get("/openapi.json")).json()

    def references(part):
        if isinstance(part, dict):
            yield from [part["$ref"]] if isinstance(part.get("$ref"), str) else []
            part = list(part.values())
        for item in part if isinstance(part, list) else ():
            yield from references(item)

    found = set(references(document))
    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"], reference


BAD_BODIES = (
    b"",
    b"{",
    b"[]",
    b"5",
    b"{}",
    b'{"model": "no-such-model"}',
    b'{"model": 5, "messages": 5, "input": 5}',
)


async def test_bad_bodies_get_the_error_that_the_document_describes(make_stack):
    stack = await make_stack(role="both", num_prefill=0)
    document = (await stack.client.get("/openapi.json")).json()
    tried = set()
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", {}) or path.startswith("/admin"):
            continue
        described = methods["post"]["responses"]["default"]["content"]["application/json"]["schema"]
        schema = described | {"components": document["components"]}
        for body in BAD_BODIES:
            answer = await stack.client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert 400 <= answer.status_code < 500, (path, body)
            jsonschema.validate(answer.json(), schema)
            tried.add(path)
    assert tried >= {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
