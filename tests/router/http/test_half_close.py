"""A client that closes only its sending side gets its answer. A client that is gone is noticed by a probe."""

import asyncio
import http.client
import json
import select
import socket

import pytest

from router.http import half_close
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import MODEL, raw_request
from testing.router.scripted_servers import hanging, saying, silent
from wire.messages.generation import RequestOutput


def body(**fields) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 3} | fields).encode()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sends_no_more_gets_its_answer(make_stack, stream):
    stack = await make_stack()
    stack.decode[0].script = saying([300, 301, 302])
    reader, writer = await raw_request(stack, body(stream=stream))
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert (b"connection: close" in answer.lower()) or stream
    assert not stack.decode[0].cancelled
    assert await stack.metric("twinfang_requests_total", outcome="completed") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waits_long_is_probed_with_what_clients_skip(make_stack, monkeypatch, stream):
    monkeypatch.setattr(half_close, "FIRST_PROBE_S", 0.0)
    monkeypatch.setattr(half_close, "PROBE_INTERVAL_S", 0.0)
    stack = await make_stack()
    go_on = asyncio.Event()

    async def wait_then_say(submit, send):
        await go_on.wait()
        await saying([300, 301, 302])(submit, send)

    stack.decode[0].script = wait_then_say

    def ask() -> bytes:
        host, port = stack.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
        connection.request(
            "POST", "/v1/completions", body(stream=stream), {"Content-Type": "application/json"}
        )
        connection.sock.shutdown(socket.SHUT_WR)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()

    num_probes = 0
    probe = half_close.HalfClose._look

    def counted(watch):
        nonlocal num_probes
        num_probes += 1
        probe(watch)

    monkeypatch.setattr(half_close.HalfClose, "_look", counted)
    asked = asyncio.create_task(asyncio.to_thread(ask))
    await until(lambda: num_probes >= 3)
    go_on.set()
    answer = await asked
    assert (
        answer.endswith(b"data: [DONE]\n\n")
        if stream
        else json.loads(answer)["usage"]["completion_tokens"] == 3
    )


@pytest.mark.parametrize("script", [hanging, silent])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_half_closed_and_then_went_away_is_noticed(
    make_stack, monkeypatch, script, stream
):
    monkeypatch.setattr(half_close, "FIRST_PROBE_S", 0.2)
    monkeypatch.setattr(half_close, "PROBE_INTERVAL_S", 0.2)
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = script
    _reader, writer = await raw_request(stack, body(stream=stream))
    writer.write_eof()
    await until(lambda: decode.submitted)
    writer.close()
    await until(lambda: decode.cancelled == [decode.submitted[0].request_id])
    await until(lambda: stack.gate.num_in_flight == 0)


async def test_http_1_0_knows_no_probe_so_work_for_it_goes_on_for_a_bounded_time(make_stack, monkeypatch):
    stack = await make_stack()
    decode = stack.decode[0]
    for limit_s, script, start in ((TIMEOUT_S, saying([300, 301, 302]), b"HTTP/1.1 200"), (0.0, silent, b"")):
        monkeypatch.setattr(half_close, "MAX_UNKNOWN_S", limit_s)
        monkeypatch.setattr(half_close, "FIRST_PROBE_S", 0.0)
        decode.script = script
        host, port = stack.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body())}\r\n\r\n"
        writer.write(f"POST /v1/completions HTTP/1.0\r\n{head}".encode() + body())
        if script is silent:
            await until(lambda: len(decode.submitted) == 2)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
        assert answer[:12] == start
        writer.close()
    await until(lambda: decode.cancelled == [decode.submitted[1].request_id])


async def test_a_request_that_was_cut_off_is_not_waited_for(make_stack):
    stack = await make_stack()
    reader, writer = await raw_request(stack, b"{", content_length=100)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
    writer.close()
    await until(lambda: stack.app.state.drain.num_running == 0)


@pytest.mark.parametrize("has_unread", [False, True])
async def test_a_client_that_leaves_its_stream_costs_no_further_token(make_stack, monkeypatch, has_unread):
    monkeypatch.setattr(half_close, "FIRST_PROBE_S", 10 * TIMEOUT_S)  # is not waited for
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = hanging  # it sends no token behind the first
    reader, writer = await raw_request(stack, body(stream=True, max_tokens=100))
    own = writer.get_extra_info("socket")
    if has_unread:
        writer.transport.pause_reading()
        await until(lambda: select.select([own], [], [], 0)[0])
    else:
        await reader.readuntil(b"data: ")
        await reader.readuntil(b"\n\n\r\n")
    writer.close()
    await until(lambda: decode.cancelled == [decode.submitted[0].request_id])
    await until(lambda: stack.gate.num_in_flight == 0)


async def test_a_client_that_leaves_before_its_stream_begins_costs_two_tokens_at_most(
    make_stack, monkeypatch
):
    """A reset answers the first write, and the second one meets it though no look has found it before."""
    watches: list[half_close.HalfClose] = []
    monkeypatch.setattr(half_close.HalfClose, "_look", lambda watch: watches.append(watch))
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = silent
    _reader, writer = await raw_request(stack, body(stream=True, max_tokens=100))
    await until(lambda: decode.submitted)
    request_id = decode.submitted[0].request_id
    writer.close()
    await until(lambda: watches)
    decode.send(RequestOutput(request_id, (300,)))
    await until(lambda: watches[0]._poll.poll(0))
    decode.send(RequestOutput(request_id, (301,)))
    await until(lambda: decode.cancelled == [request_id])
    await until(lambda: stack.gate.num_in_flight == 0)
