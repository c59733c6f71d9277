"""Requests to a stack as clients send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from testing.fleets.stack import Stack

TIMEOUT_S = 120.0


@dataclass
class Answer:
    """One completion's tokens, and how it ended."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


def greedy_body(prompt: list[int] | str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


async def complete(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Requests one completion, not streamed. If that fails, the error has the server's message."""
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return Answer(choice.get("token_ids", []), choice["text"], choice["finish_reason"])


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[Answer]:
    """Streams one completion; after every event, yields the answer so far."""
    answer = Answer()
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                answer.token_ids += choice.get("token_ids") or []
                answer.text += choice["text"]
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            yield answer


async def all_at_once(stack: Stack, bodies: list[dict[str, Any]]) -> list[Answer]:
    async with http_client(stack) as client:
        return await asyncio.gather(*(complete(client, body) for body in bodies))


async def one_at_a_time(stack: Stack, bodies: list[dict[str, Any]]) -> list[Answer]:
    async with http_client(stack) as client:
        return [await complete(client, body) for body in bodies]


def http_client(stack: Stack) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200)
    trust = stack.trust() if isinstance(stack, Stack) else True  # tests also have stacks of their own kinds
    return httpx.AsyncClient(base_url=stack.url, timeout=TIMEOUT_S, limits=limits, verify=trust)
