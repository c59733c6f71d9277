"""Connections with more than one simple HTTP/1.1 request: HTTP/1.0, pipelined and broken requests."""

import asyncio
import json
import re

import pytest

from testing.conditions import TIMEOUT_S
from testing.router.scripted_router import MODEL, raw
from testing.router.scripted_servers import saying


@pytest.fixture
async def stack(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300, 301, 302])
    return stack


def post(version: str = "1.1", **fields) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 3} | fields).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


# --- HTTP/1.0 --------------------------------------------------------------------------------------


async def test_a_stream_on_http_1_0_has_no_chunks_and_ends_with_its_connection(stack):
    head, _, body = (await raw(stack.url, post("1.0", stream=True))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events[:-2]]
    answer = (await stack.complete(prompt="hello", max_tokens=3)).json()
    assert "".join(texts) == answer["choices"][0]["text"]


async def test_an_answer_in_one_piece_on_http_1_0_has_its_length(stack):
    head, _, body = (await raw(stack.url, post("1.0"))).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    head, _, body = (await raw(stack.url, b"HEAD /metrics HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert (head[:12], body) == (b"HTTP/1.1 200", b"")


# --- pipelined requests ----------------------------------------------------------------------------

GARBAGE = b"\x00garbage\r\n\r\n"
TOO_LARGE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n"
BAD_CHUNK = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n"
)


def statuses(answers: bytes) -> list[bytes]:
    return [answers[found.end() :][:3] for found in re.finditer(rb"HTTP/1\.1 ", answers)]


@pytest.mark.parametrize("num_before", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("broken", "status"),
    [(GARBAGE, b"400"), (TOO_LARGE, b"431"), (BAD_CHUNK, b"400")],
    ids=["garbage", "large", "chunk"],
)
async def test_requests_before_one_that_is_broken_are_answered_first(
    stack, num_before, stream, broken, status
):
    before = post(stream=stream) * num_before
    for parts in ((before + broken,), (before, broken, b"what comes behind is dropped")):
        answers = await raw(stack.url, *parts)
        assert statuses(answers) == [b"200"] * num_before + [status]
        assert answers.count(b"data: [DONE]" if stream else b'"finish_reason"') == num_before
        last = answers[answers.rindex(b"HTTP/1.1 ") :].lower()
        assert b"connection: close" in last
    assert len(stack.decode[0].submitted) == 2 * num_before


async def test_a_client_that_half_closes_behind_one_that_is_broken_gets_both_answers(stack):
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(post() + GARBAGE)
    writer.write_eof()
    answers = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    writer.close()
    assert statuses(answers) == [b"200", b"400"]


async def test_a_connection_that_was_to_be_closed_says_nothing_behind_its_answer(stack):
    asked = post().replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    assert statuses(await raw(stack.url, asked + GARBAGE)) == [b"200"]
