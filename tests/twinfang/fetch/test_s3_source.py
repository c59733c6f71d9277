"""Objects of a store with S3's interface, by requests that are signed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from twinfang.cli import main

pytest.importorskip("botocore", reason="the extra s3 is not installed")

MODEL = {"config.json": b"{}", "tokenizer.json": b"{}" * 3000}
LIST = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name><Prefix>m/</Prefix>
<KeyCount>2</KeyCount><IsTruncated>false</IsTruncated>
<Contents><Key>m/config.json</Key><Size>2</Size></Contents>
<Contents><Key>m/tokenizer.json</Key><Size>6000</Size></Contents></ListBucketResult>"""


@pytest.fixture
def store(serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    server = serve({f"bucket/m/{name}": content for name, content in MODEL.items()})
    server.files["bucket"] = LIST.encode()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "here")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    return server


def test_objects_come_by_signed_urls(store: Any, place: Path) -> None:
    store.cut_after = 2_000
    assert main(["fetch-model", "s3://bucket/m/", str(place), "--without-weights"]) == 0
    assert {name: (place / name).read_bytes() for name in MODEL} == MODEL
    assert {path for path, _ in store.requests} == {"bucket", *(f"bucket/m/{name}" for name in MODEL)}
    for (path, headers), query in zip(store.requests, store.queries, strict=True):
        if path == "bucket":
            assert "AWS4-HMAC-SHA256 Credential=id/" in headers["Authorization"]
        else:
            assert "X-Amz-Signature=" in query
            assert "Authorization" not in headers
        assert "secret" not in f"{headers}{query}"


def test_a_refusal_of_the_store_is_told(store: Any, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.statuses = [403]
    assert main(["fetch-model", "s3://bucket/m", str(place)]) == 1
    assert "s3://bucket/m can't be listed" in capsys.readouterr().err
