"""What a client's connection says beyond what HTTP/1.1 needs for one request."""

import json

import pytest

from tests.router.conftest import MODEL
from tests.router.scripted_servers import saying
from tests.router.test_edges import raw


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
