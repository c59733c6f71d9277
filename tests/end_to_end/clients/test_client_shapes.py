"""Requests that real clients sent are answered in the types that these clients read, or refused as the record
says (testing/client_shapes)."""

from __future__ import annotations

import asyncio

import pytest

from testing.client_shapes.answers import check_answer
from testing.client_shapes.recorded import recorded
from testing.fleets.clients import http_client

REQUESTS = recorded()
LEAST = 30


@pytest.mark.parametrize("client", REQUESTS)
async def test_what_a_client_sends_is_answered_as_it_expects(agent_stack, client):
    async with http_client(agent_stack) as http:

        async def fault_of(request):
            """What is wrong with the answer; None if nothing is."""
            answer = await http.request(
                request.method,
                request.path,
                headers=request.headers,
                json=request.body_for(agent_stack.model),
            )
            try:
                check_answer(request, answer.status_code, answer.headers["Content-Type"], answer.text)
            except (AssertionError, ValueError, KeyError) as fault:
                return f"{request.name}: {type(fault).__name__}: {fault}"
            return None

        faults = await asyncio.gather(*map(fault_of, REQUESTS[client]))
    assert not [fault for fault in faults if fault is not None]
    agent_stack.wait_until(agent_stack.is_idle, "nothing is left behind")


def test_records_are_of_many_kinds():
    requests = [request for one in REQUESTS.values() for request in one]
    assert len(requests) >= LEAST
    assert {request.endpoint for request in requests} >= {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
    assert any(request.streams for request in requests)
    assert any(request.refused for request in requests)
