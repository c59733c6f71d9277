"""A client's long texts and slow grammars wait for few of another client's, over real processes."""

import asyncio
import json

import httpx
import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from testing.fleets.stack import running_router

pytestmark = pytest.mark.in_clear  # its routers have no certificate
TEXT = "".join(f" word{i}" for i in range(7_000))


def schema(name, num_fields):
    fields = {f"{name}_{i}": {"enum": [f"v{i}_{j}" for j in range(12)]} for i in range(num_fields)}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


@pytest.fixture
def clients(stacks, tmp_path):
    """The headers of alice and bob, and the URL of a router that knows their keys."""
    stack = stacks("up")
    keys = {name: new_key() for name in ("alice", "bob")}
    path = tmp_path / "keys"
    path.write_text("\n".join(key_line(ApiKey(name, digest_of(key))) for name, key in keys.items()))
    servers = [
        f"--{p.name.partition('-')[0]}={p.address}" for p in stack.processes().values() if "-" in p.name
    ]
    with running_router("--api-keys-file", str(path), *servers) as url:
        yield url, {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}


async def ended_before(clients, path, hostile, victim):
    """Returns how many of bob's requests were answered before alice's, which came last, and alice's
    answer. Then bob leaves."""
    url, headers = clients
    num_ended, limits = 0, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:

        async def ask(body):
            nonlocal num_ended
            await client.post(path, json=body, headers=headers["bob"])
            num_ended += 1

        async with client.stream("GET", "/healthz"):
            tasks = [asyncio.create_task(ask(body)) for body in hostile]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        before = num_ended
        answer = await client.post(path, json=victim, headers=headers["alice"])
        before = num_ended - before
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return before, answer


async def test_a_long_text_waits_for_few_of_another_client(clients):
    bodies = [{"prompt": f"{i}{TEXT}"} for i in range(100)]
    before, answer = await ended_before(clients, "/tokenize", bodies, {"prompt": TEXT[:3_000]})
    assert answer.status_code == 200, answer.text
    assert before < 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("fields", ["guided_regex", "guided_json"])
async def test_a_large_schema_waits_for_few_slow_grammars_of_another_client(clients, fields):
    def body(i):
        value = f"(a{{1000}}){{{1000 + i}}}" if fields == "guided_regex" else schema(f"f{i}", 400)
        return {"prompt": "a", "max_tokens": 1, "seed": 0, fields: value}

    mine = {"prompt": "a", "max_tokens": 2, "seed": 0, "guided_json": schema("mine", 400)}
    assert len(json.dumps(mine)) > 20_000
    before, answer = await ended_before(clients, "/v1/completions", [body(i) for i in range(64)], mine)
    assert answer.status_code == 200, answer.text
    if fields == "guided_json":
        assert before < 32
