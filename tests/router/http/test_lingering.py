"""An answer sent before the body's end is the connection's last, and arrives whatever the client still
sends."""

import asyncio
import json

import pytest

from router.access.api_keys import ApiKey, digest_of
from router.access.key_file import key_line
from router.http import lingering
from router.http.bodies import json_body
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import raw_request
from testing.router.scripted_servers import saying

EARLY = {
    "too slow": (400, {"head": "Authorization: Bearer key\r\n"}),
    "no key": (401, {}),
    "no such address": (404, {"path": "/v1/nothing", "head": "Authorization: Bearer key\r\n"}),
    "no method of it": (405, {"path": "/v1/models", "head": "Authorization: Bearer key\r\n"}),
    "too large": (413, {"content_length": 10**9, "head": "Authorization: Bearer key\r\n"}),
}


@pytest.fixture
async def stack(make_stack, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(key_line(ApiKey("alice", digest_of("key"))))
    stack = await make_stack(api_keys_file=keys)
    stack.decode[0].script = saying([300])
    return stack


async def answer_of(reader) -> tuple[int, bytes]:
    """Status and headers in lower case; the answer must be whole, and the last thing on its connection."""
    data = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    head, _, body = data.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["message"]
    return int(head.split()[1]), head.lower()


async def is_closed(writer) -> None:
    """Sends on until nobody takes it."""

    async def send_on() -> None:
        while True:
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.001)

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_on(), TIMEOUT_S)
    writer.close()


@pytest.mark.parametrize("why", EARLY)
async def test_a_body_that_trickles_behind_its_answer_is_not_waited_for(stack, monkeypatch, why):
    monkeypatch.setattr(lingering, "MAX_DRAIN_S", 0.05)
    monkeypatch.setattr(json_body, "BODY_TIMEOUT_S", 0.05)
    status, request = EARLY[why]
    reader, writer = await raw_request(stack, b"{", **({"content_length": 10_000} | request))
    got, head = await answer_of(reader)
    assert got == status
    assert head.count(b"connection: close") == 1
    await is_closed(writer)


async def test_only_so_many_bytes_are_taken_behind_an_answer(stack, monkeypatch):
    monkeypatch.setattr(lingering, "MAX_DRAIN_S", 10 * TIMEOUT_S)
    monkeypatch.setattr(lingering, "MAX_DRAIN_BYTES", 50_000)
    reader, writer = await raw_request(stack, b"{", content_length=10**9)
    assert (await answer_of(reader))[0] == 401
    await is_closed(writer)


async def test_a_client_that_sends_all_before_it_reads_gets_its_answer(stack):
    body = json.dumps({"prompt": "a" * 3_000_000}).encode()
    for _ in range(3):
        answer = await stack.client.post("/v1/completions", content=body)
        assert answer.status_code == 401


async def test_a_head_that_is_too_large_is_answered_to_who_sends_on(make_stack, monkeypatch):
    monkeypatch.setattr(lingering, "MAX_DRAIN_S", 0.05)
    stack = await make_stack(max_header_bytes=4096)
    reader, writer = await raw_request(stack, b"x" * 100_000, head=f"X: {'a' * 5000}\r\n")
    assert (await answer_of(reader))[0] == 431
    await is_closed(writer)


async def test_a_refusal_of_a_whole_request_keeps_the_connection(stack):
    reader, writer = await raw_request(stack, b"{}")
    for _ in range(2):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        assert b" 401 " in head
        assert b"connection" not in head.lower()
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(size)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
    writer.close()
    await until(lambda: stack.gate.num_in_flight == 0)
