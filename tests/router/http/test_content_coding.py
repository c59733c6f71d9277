import gzip
import json
import zlib

import pytest

from router.http import content_coding
from tests.router.conftest import MODEL
from tests.router.scripted_servers import saying

BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1}).encode()
LIMIT = 100_000


@pytest.fixture
async def stack(make_stack):
    stack = await make_stack(max_body_bytes=LIMIT)
    stack.decode[0].script = saying([300])
    return stack


async def post(stack, content, coding: str):
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return await stack.client.post("/v1/completions", content=content, headers=headers)


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("X-GZip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
        ("identity, gzip", gzip.compress(BODY, mtime=0)),
        ("", BODY),
    ],
)
async def test_compressed_bodies_are_read_whole_or_in_pieces(stack, coding, data):
    async def pieces():
        for byte in data:
            yield bytes([byte])

    for content in (data, pieces()):
        assert (await post(stack, content, coding)).status_code == 200


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "gzip, br", "nonsense", "a" * 1000])
async def test_other_codings_are_refused_by_name(stack, coding):
    refused = await post(stack, gzip.compress(BODY, mtime=0), coding)
    assert refused.status_code == 415
    error = refused.json()["error"]
    assert error["code"] == "unsupported_content_encoding"
    assert "Content-Encoding" in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", BODY),
        ("deflate", BODY),
        ("gzip", b""),
        ("gzip", gzip.compress(BODY, mtime=0)[:-1]),
        ("gzip", gzip.compress(BODY, mtime=0)[:-8] + b"12345678"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"x"),
        ("deflate", zlib.compress(BODY)[:-5]),
    ],
)
async def test_corrupt_data_is_a_400_and_the_next_request_served(stack, coding, data):
    refused = await post(stack, data, coding)
    assert refused.status_code == 400
    assert f"Content-Encoding: {coding}" in refused.json()["error"]["message"]
    assert (await post(stack, gzip.compress(BODY, mtime=0), "gzip")).status_code == 200


async def test_the_limit_counts_what_a_body_becomes_and_nothing_above_is_made(stack, monkeypatch):
    made = 0
    push = content_coding.Inflater.push

    def counted(inflater, data, max_bytes):
        nonlocal made
        inflated = push(inflater, data, max_bytes)
        made += len(inflated)
        return inflated

    monkeypatch.setattr(content_coding.Inflater, "push", counted)
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413), (500 * LIMIT, 413)):
        made = 0
        data = BODY + b" " * (size - len(BODY))
        for coding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            compressed = compress(data)
            assert len(compressed) < LIMIT
            assert (await post(stack, compressed, coding)).status_code == status
        assert made <= 2 * (LIMIT + 1)
