import gzip
import json
import zlib

import pytest

from router.http.bodies import content_coding
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import saying

BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1}).encode()
LIMIT = 100_000


@pytest.fixture
async def stack(make_stack):
    stack = await make_stack(max_body_bytes=LIMIT)
    stack.decode[0].script = saying([300])
    return stack


def in_members(data: bytes) -> bytes:
    third = len(data) // 3
    return b"".join(map(gzip.compress, (data[:third], data[third : 2 * third], data[2 * third :])))


async def post(stack, content, coding: str):
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return await stack.client.post("/v1/completions", content=content, headers=headers)


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        (
            "gzip",
            gzip.compress(BODY[:9], mtime=0) + gzip.compress(b"", mtime=0) + gzip.compress(BODY[9:], mtime=0),
        ),
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
        ("gzip", gzip.compress(BODY, mtime=0) + gzip.compress(b" ", mtime=0)[:-1]),
        ("deflate", zlib.compress(BODY)[:-5]),
        ("deflate", zlib.compress(BODY) + zlib.compress(b" ")),
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
        for coding, compress in (("gzip", gzip.compress), ("gzip", in_members), ("deflate", zlib.compress)):
            compressed = compress(data)
            assert len(compressed) < LIMIT
            assert (await post(stack, compressed, coding)).status_code == status
        assert made <= 3 * (LIMIT + 1)


async def test_a_body_of_too_many_members_is_refused(stack):
    members = [gzip.compress(BODY, mtime=0), *[gzip.compress(b"")] * content_coding.MAX_MEMBERS]
    assert (await post(stack, b"".join(members[:-1]), "gzip")).status_code == 200
    refused = await post(stack, b"".join(members), "gzip")
    assert refused.status_code == 400
    assert f"more than {content_coding.MAX_MEMBERS} gzip members" in refused.json()["error"]["message"]
