"""HTTPS on the event loop that production uses: versions, limits, and certificates that change."""

import asyncio
import json
import logging
import ssl

import httpx
import pytest
import uvloop

from router.http import server
from testing.certificates import Authority
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_servers import hanging, saying
from wire.messages.generation import RequestOutput
from wire.tls.key_pair import KeyPair

NUM_STREAMS = 200
NUM_TOKENS = 6


pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(scope="module")
def event_loop_policy():
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(authority, tmp_path):
    return authority.write(tmp_path, "old.example.com")


@pytest.fixture
def make_https(make_stack, files):
    async def make(**config):
        stack = await make_stack(certificate=files, **config)
        stack.decode[0].script = saying([50] * NUM_TOKENS)
        return stack

    return make


def port_of(stack) -> int:
    return int(stack.url.rpartition(":")[2])


async def connect(stack, trust: ssl.SSLContext):
    return await asyncio.open_connection("127.0.0.1", port_of(stack), ssl=trust, limit=1 << 20)


def request(body: dict, *, path="/v1/completions", head="") -> bytes:
    content = json.dumps({"model": "tiny", "prompt": "hello"} | body).encode()
    start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
    return f"{start}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def serves(stack, trust: ssl.SSLContext) -> bool:
    async with httpx.AsyncClient(base_url=stack.url, verify=trust, timeout=TIMEOUT_S) as client:
        answers = [await client.post("/v1/completions", content=request({}).partition(b"\r\n\r\n")[2])] * 2
    return all(answer.json()["usage"]["completion_tokens"] == NUM_TOKENS for answer in answers)


async def test_the_loop_is_that_of_production():
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_completion_over_each_version(make_https, authority, version):
    stack = await make_https()
    trust = authority.client()
    trust.minimum_version = trust.maximum_version = version
    assert await serves(stack, trust)


async def test_an_older_version_is_refused(make_https, authority):
    stack = await make_https()
    old = authority.client()
    old.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await connect(stack, old)
    assert await serves(stack, authority.client())


async def test_a_new_certificate_breaks_no_stream(make_https, authority, tmp_path):
    """Hundreds of streams go on under the old one, while each new connection sees the new one."""
    stack = await make_https(max_requests_in_flight=2 * NUM_STREAMS)
    goes_on = asyncio.Event()

    async def paused(submit, send) -> None:
        send(RequestOutput(submit.request_id, (50,)))
        await goes_on.wait()
        for i in range(1, NUM_TOKENS):
            send(
                RequestOutput(
                    submit.request_id, (50,), finish_reason="length" if i == NUM_TOKENS - 1 else None
                )
            )
            await asyncio.sleep(0)

    stack.decode[0].script = paused
    trust = authority.client()
    streams = []
    for _ in range(NUM_STREAMS):
        reader, writer = await connect(stack, trust)
        writer.write(request({"stream": True, "max_tokens": NUM_TOKENS}, head="Connection: close\r\n"))
        streams.append((reader, writer))
    for reader, _ in streams[:8]:
        assert await reader.readuntil(b"data: ")
    authority.write(tmp_path, "new.example.com")

    async def sees_new() -> bool:
        _, writer = await connect(stack, trust)
        names = writer.get_extra_info("peercert")["subjectAltName"]
        writer.close()
        return ("DNS", "new.example.com") in names

    await until(sees_new)
    goes_on.set()
    for reader, writer in streams:
        answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


async def test_a_client_that_speaks_http_is_ended_and_disturbs_nobody(make_https, authority, caplog):
    stack = await make_https()
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(stack))
        writer.write(request({}))
        assert not (await asyncio.wait_for(reader.read(), TIMEOUT_S)).startswith(b"HTTP")
        writer.close()
    assert await serves(stack, authority.client())
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


async def test_a_handshake_has_its_time(make_https, authority, monkeypatch):
    monkeypatch.setitem(server.TLS_LIMITS, "ssl_handshake_timeout", 0.1)
    stack = await make_https()
    silent = [await asyncio.open_connection("127.0.0.1", port_of(stack)) for _ in range(20)]
    for reader, writer in silent:
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        writer.close()
    assert await serves(stack, authority.client())


@pytest.mark.parametrize("status", [413, 404])
async def test_a_client_that_sends_all_before_it_reads_gets_its_answer(make_https, authority, status):
    stack = await make_https(max_body_bytes=1000)
    path = "/v1/nothing" if status == 404 else "/v1/completions"
    for _ in range(3):
        reader, writer = await connect(stack, authority.client())
        writer.write(request({"prompt": "a" * 3_000_000}, path=path))
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        writer.close()


async def test_a_client_that_never_stops_sending_is_cut_off(make_https, authority, monkeypatch):
    monkeypatch.setitem(server.TLS_LIMITS, "ssl_shutdown_timeout", 0.2)
    stack = await make_https(max_body_bytes=1000)
    _, writer = await connect(stack, authority.client())
    writer.write(request({"prompt": "a" * 3_000_000})[:-1])

    async def send_on() -> None:
        while True:
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.001)

    with pytest.raises((ConnectionError, ssl.SSLError)):
        await asyncio.wait_for(send_on(), TIMEOUT_S)


async def test_a_client_that_closes_ends_its_request(make_https, authority, caplog):
    """TLS connections end in both directions at once: there is nobody left who could read the answer."""
    stack = await make_https()
    stack.decode[0].script = hanging
    reader, writer = await connect(stack, authority.client())
    writer.write(request({"stream": True}))
    await reader.readuntil(b"data: ")
    assert stack.gate.num_in_flight == 1
    writer.close()
    await until(lambda: stack.gate.num_in_flight == 0)
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


async def test_the_metric_says_when_the_certificate_expires(make_https, files):
    stack = await make_https()
    expires_s = await stack.metric("twinfang_router_certificate_expiry_timestamp_seconds")
    assert expires_s == KeyPair.read(files).expires_s
