"""The served OpenAPI document is true: what it allows is answered as it says, never by a 5xx."""

from __future__ import annotations

import asyncio

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
from testing.router.scripted_servers import saying

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
NUM_EXAMPLES = 25
USER = {"role": "user", "content": "hello"}
RIGHT = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [USER]},
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
    posts = [f"POST {path}" for path in ("/v1/completions", *RIGHT)]
    assert all(accepted[name] for name in (*posts, "GET /v1/models", "GET /metrics")), accepted


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
