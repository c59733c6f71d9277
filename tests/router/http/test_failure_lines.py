"""Failures in the log: one line, then a count; the sender of unreadable messages; no library's advice."""

import asyncio
import contextlib
import logging
import subprocess
import sys

import httpx
import pytest

from router.http import connection as http_connection
from router.http import openai_errors
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import raw
from testing.router.scripted_servers import ScriptedDecode, failing, saying, server_info, silent
from testing.router.tokenizers import write_model_dir
from twinfang.stack.ports import free_ports
from wire.errors import CapacityError


@pytest.fixture
def shown(caplog):
    """Lines of a level and above."""
    caplog.set_level(logging.DEBUG)
    for lines in (openai_errors.lines, http_connection.lines):
        lines.tell()
        lines.tell()  # those of earlier tests are forgotten
    caplog.clear()

    def of(level: int, part: str = "") -> list[logging.LogRecord]:
        return [one for one in caplog.records if one.levelno >= level and part in one.getMessage()]

    return of


async def test_many_failed_requests_are_a_line_and_a_count_and_each_a_line_for_debugging(make_stack, shown):
    stack = await make_stack()
    stack.decode[0].script = failing(CapacityError("no room"))
    ids = [f"request-{i}" for i in range(30)]
    body = {"model": "tiny", "prompt": "hello"}
    for stream, request_id in enumerate(ids):
        answer = await stack.client.post(
            "/v1/completions", json=body | {"stream": bool(stream % 2)}, headers={"X-Request-Id": request_id}
        )
        assert answer.status_code == 500
    (first,) = shown(logging.INFO, "no room")
    assert (first.levelno, ids[0] in first.getMessage()) == (logging.ERROR, True)
    for request_id in ids:
        assert shown(logging.DEBUG, f"{request_id}: insufficient_capacity at decode-")
    openai_errors.lines.tell()
    (count,) = shown(logging.INFO, "29 more")
    assert "insufficient_capacity at decode-" in count.getMessage()
    assert count.levelno == logging.ERROR


async def test_many_retries_are_a_line_and_a_count(make_stack, shown):
    stack = await make_stack()
    await stack.prefill[0].stop()
    await asyncio.gather(*(stack.complete(prompt=[5, 6, 7]) for _ in range(10)))
    told = [line.getMessage() for line in shown(logging.WARNING, "trying again")]
    assert len([line for line in told if " more in the last " not in line]) <= 2, "one a code and server"


async def test_a_deadline_that_a_client_chose_is_no_error_of_the_router(make_stack, shown):
    stack = await make_stack(request_timeout_s=0.3)
    stack.decode[0].script = silent
    body = {"model": "tiny", "prompt": "hello"}
    chosen = await stack.client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.1"})
    assert chosen.status_code == 504
    (line,) = shown(logging.DEBUG, "deadline_exceeded")
    assert (line.levelno, "chosen by clients" in line.getMessage()) == (logging.INFO, True)
    for headers in ({}, {"X-Request-Timeout": "9"}):
        assert (await stack.client.post("/v1/completions", json=body, headers=headers)).status_code == 504
    assert len(shown(logging.ERROR, "deadline_exceeded")) == 1


async def test_a_request_for_a_websocket_is_answered_without_advice_to_install_one(make_stack, shown):
    stack = await make_stack()
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"

    async def ask() -> bytes:
        host, port = stack.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + upgrade + key)
        line = await reader.readline()
        writer.close()
        return line

    for _ in range(5):
        assert await ask() == b"HTTP/1.1 200 OK\r\n"
    assert not shown(logging.DEBUG, "pip install")
    assert not shown(logging.DEBUG, "Unsupported upgrade")
    (line,) = shown(logging.INFO, "another protocol")
    assert (line.levelno, "127.0.0.1" in line.getMessage()) == (logging.INFO, True)


async def test_who_sends_no_http_is_named(make_stack, shown):
    stack = await make_stack()
    for _ in range(5):
        assert b"invalid_http" in await raw(stack.url, b"nonsense\r\n\r\n")
    await until(lambda: len(shown(logging.DEBUG, "invalid_http: client 127.0.0.1:")) == 5)
    assert len(shown(logging.INFO, "invalid_http")) == 1
    assert not shown(logging.DEBUG, "Invalid HTTP request")


async def test_what_grpc_says_of_forks_and_servers_that_stop_is_not_in_the_log(tmp_path):
    decode = ScriptedDecode(server_info("both"), script=saying([300]))
    await decode.start()
    (port,) = free_ports(1)
    model = write_model_dir(tmp_path / "model")
    (model / "config.json").write_text("{}")
    flags = ["--model", str(model), "--decode", decode.address, "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "twinfang", "router", *flags]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:

            async def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/readyz")).status_code == 200
                return False

            async with asyncio.timeout(TIMEOUT_S):
                while not await is_ready():
                    await asyncio.sleep(0.05)
            body = {"prompt": "hello", "max_tokens": 1, "guided_regex": "a|b"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await decode.stop()
        await until(lambda: "is not in use" in log.read_text())
    finally:
        process.kill()
        process.wait()
        await decode.stop()
    assert [line for line in log.read_text().splitlines() if not line.startswith("time=")] == []
