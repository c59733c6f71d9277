"""A model comes whole and unchanged or not at all, from sources that fail on the way."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from twinfang.cli import main
from twinfang.fetch.file_fetch import MAX_FRUITLESS
from twinfang.fetch.folder_source import FolderSource
from twinfang.fetch.http_source import HttpSource
from twinfang.fetch.model_fetch import fetch_model
from twinfang.fetch.partial_file import DamagedFileError
from twinfang.fetch.source import FetchError, Source
from wire.errors import DeadlineError

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def shard(seed: int) -> bytes:
    return save({"weight": np.random.default_rng(seed).integers(0, 255, 200_000, dtype=np.uint8)})


MODEL = {
    "config.json": b'{"model_type": "tiny"}',
    "tokenizer.json": b"{}" * 5_000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"layer.{i}": name for i, name in enumerate(SHARDS * 2)}}
    ).encode(),
    **{name: shard(i) for i, name in enumerate(SHARDS)},
}
NOT_READ = {"README.md": b"a model", "pytorch_model.bin": b"the weights once more"}


def on(server: Any) -> dict[str, bytes]:
    return {f"model/{name}": content for name, content in server.items()}


def fetch(source: Source | str, place: Path, *, with_weights: bool = True, timeout_s: float = 60.0) -> None:
    if isinstance(source, str):
        source = HttpSource(f"{source}/model")
    fetch_model(source, place, with_weights=with_weights, connections=2, timeout_s=timeout_s)


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != ".fetched.json"}


def test_the_files_that_are_read_of_a_model_come_and_no_others(serve: Any, place: Path) -> None:
    server = serve(on(MODEL | NOT_READ))
    server.add_sums()
    fetch(server.url, place)
    assert contents(place) == MODEL
    assert [path.name for path in place.parent.iterdir() if path != place] == [".tiny.lock"]
    record = json.loads((place / ".fetched.json").read_text())
    assert {file["name"]: file["sha256"] for file in record["files"]} == {
        name: hashlib.sha256(content).hexdigest() for name, content in MODEL.items()
    }
    asked = len(server.requests)
    fetch(server.url, place)
    assert len(server.requests) == asked, "a model that is there does not need its source"


def test_a_single_file_of_weights_and_a_list_of_sums_are_optional(serve: Any, place: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": shard(0)}
    fetch(serve(on(files)).url, place)
    assert contents(place) == files


def test_a_router_gets_no_weights(serve: Any, place: Path) -> None:
    server = serve(on(MODEL))
    fetch(server.url, place, with_weights=False)
    assert contents(place) == {name: MODEL[name] for name in ("config.json", "tokenizer.json")}
    assert not [path for path, _ in server.requests if "safetensors" in path]
    with pytest.raises(FetchError, match="was fetched without weights"):
        fetch(server.url, place)


def test_connections_that_break_off_are_taken_up_where_they_broke(serve: Any, place: Path) -> None:
    server = serve(on(MODEL))
    server.cut_after = 30_000
    fetch(server.url, place)
    assert contents(place) == MODEL
    assert server.bytes_sent == sum(map(len, MODEL.values())), "no byte came twice"


def test_a_later_call_continues(serve: Any, place: Path) -> None:
    server = serve(on(MODEL))
    server.cut_after = 150_000
    path = f"model/{SHARDS[0]}"

    class Ends(HttpSource):
        def open(self, name: str, start: int = 0, validator: str = "") -> Any:
            if name == SHARDS[0] and start:
                server.statuses = [503] * MAX_FRUITLESS
            return super().open(name, start, validator)

    with pytest.raises(FetchError, match=rf"answered 503 .* tried {MAX_FRUITLESS} times"):
        fetch_model(Ends(f"{server.url}/model"), place, with_weights=True, connections=1, timeout_s=60.0)
    assert not place.exists()
    server.statuses, server.cut_after = [], None
    before = len(server.requests)
    fetch(server.url, place)
    assert contents(place) == MODEL
    later = server.requests[before:]
    assert [headers["Range"] for asked, headers in later if asked == path] == ["bytes=150000-"]
    assert "model/config.json" not in [asked for asked, _ in later], "what is whole is not asked for again"


@pytest.mark.parametrize("heeds_if_range", [True, False])
def test_a_file_that_changes_meanwhile_begins_again(serve: Any, place: Path, heeds_if_range: bool) -> None:
    files = {"config.json": b"{}", "model.safetensors": shard(0)}
    server = serve(on(files))
    server.cut_after, server.heeds_if_range = 150_000, heeds_if_range

    class Changes(HttpSource):
        def open(self, name: str, start: int = 0, validator: str = "") -> Any:
            if start:
                server.files["model/model.safetensors"] = shard(7)
            return super().open(name, start, validator)

    fetch(Changes(f"{server.url}/model"), place)
    assert contents(place)["model.safetensors"] == shard(7)


def test_a_damaged_file_comes_once_more_and_is_refused_if_it_is_damaged_again(
    serve: Any, place: Path
) -> None:
    server = serve(on(MODEL))
    server.add_sums()
    path = f"model/{SHARDS[1]}"
    good = server.files[path]
    server.files[path] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(
        DamagedFileError, match=rf"{SHARDS[1]} has the sha256 checksum \w+, and its source says"
    ):
        fetch(server.url, place)
    assert len(server.asked(path)) == 2
    assert not place.exists()
    server.files[path] = good
    fetch(server.url, place)
    assert contents(place) == MODEL


@pytest.mark.parametrize("damage", ["short", "no header"])
def test_without_a_checksum_weights_are_compared_with_their_own_header(
    serve: Any, place: Path, damage: str
) -> None:
    weights = shard(0)[:-100] if damage == "short" else b"<html>"
    with pytest.raises(DamagedFileError, match=r"by its header|no header of safetensors"):
        fetch(serve(on({"config.json": b"{}", "model.safetensors": weights})).url, place)


def hub_of(serve: Any) -> tuple[Any, Any]:
    """A hub, and the storage that it redirects to for weights."""
    storage = serve({name: content for name, content in MODEL.items() if name in SHARDS})
    hub = serve(on(MODEL))
    for name, content in MODEL.items():
        path = f"model/{name}"
        hub.headers[path] = {"X-Repo-Commit": "c1"}
        if name in SHARDS:
            digest = hashlib.sha256(content).hexdigest()
            hub.headers[path] |= {
                "Location": f"{storage.url}/{name}?signed=1",
                "X-Linked-Etag": f'"{digest}"',
            }
        else:
            blob = b"blob %d\0" % len(content) + content
            hub.etags[path] = f'"{hashlib.sha1(blob).hexdigest()}"'
    return hub, storage


def test_a_hub_says_what_its_files_are_and_its_token_goes_to_nobody_else(serve: Any, place: Path) -> None:
    hub, storage = hub_of(serve)
    storage.cut_after = 90_000
    fetch(HttpSource(f"{hub.url}/model", token="secret"), place)
    assert contents(place) == MODEL
    record = json.loads((place / ".fetched.json").read_text())
    assert record["revision"] == "c1"
    checked = {file["name"]: file["checked_by"] for file in record["files"]}
    assert checked == {name: ("sha256" if name in SHARDS else "git") + " of the source" for name in MODEL}
    assert {headers.get("Authorization") for _, headers in hub.requests} == {"Bearer secret"}
    assert {headers.get("Authorization") for _, headers in storage.requests} == {None}


def test_files_of_two_versions_are_never_mixed(serve: Any, place: Path) -> None:
    hub, _ = hub_of(serve)

    class Moves(HttpSource):
        def open(self, name: str, start: int = 0, validator: str = "") -> Any:
            if name == SHARDS[0]:
                for headers in hub.headers.values():
                    headers["X-Repo-Commit"] = "c2"
            return super().open(name, start, validator)

    fetch(Moves(f"{hub.url}/model"), place)
    assert contents(place) == MODEL
    assert json.loads((place / ".fetched.json").read_text())["revision"] == "c2"
    assert len(hub.asked("model/config.json")) == 2


@pytest.mark.parametrize(
    ("headers", "checked_by"),
    [
        ({}, "md5 of the source"),
        ({"x-amz-server-side-encryption": "aws:kms"}, "its size"),
    ],
    ids=["plain", "encrypted"],
)
def test_an_object_stores_etag_is_its_md5_unless_it_is_encrypted(
    serve: Any, place: Path, headers: dict[str, str], checked_by: str
) -> None:
    server = serve(on({"config.json": b"{}", "model.safetensors": shard(0)}))
    path = "model/model.safetensors"
    server.headers[path] = {"x-amz-request-id": "1"} | headers
    server.etags[path] = f'"{hashlib.md5(server.files[path]).hexdigest()}"'
    fetch(server.url, place)
    record = json.loads((place / ".fetched.json").read_text())
    assert record["files"][1]["checked_by"] == checked_by
    if not headers:
        server.files[path] = shard(3)
        with pytest.raises(DamagedFileError, match="md5"):
            fetch(server.url, place.with_name("other"))


def test_of_several_processes_one_fetches_and_the_others_wait(serve: Any, place: Path) -> None:
    server = serve(on(MODEL))
    threads = [threading.Thread(target=fetch, args=(server.url, place)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert contents(place) == MODEL
    assert [len(server.asked(f"model/{name}")) for name in MODEL] == [1] * len(MODEL)


def test_a_source_that_has_no_time_now_is_asked_again(serve: Any, place: Path) -> None:
    server = serve(on(MODEL))
    server.statuses = [404, 503, 429, 500]  # SHA256SUMS, then config.json
    fetch(server.url, place)
    assert len(server.asked("model/config.json")) == 4


@pytest.mark.parametrize(
    ("statuses", "files", "complaint"),
    [
        ([404, 401], MODEL, "config.json is answered 401 .*give a token"),
        ([404, 400], MODEL, "config.json is answered 400"),
        ([], {"tokenizer.json": b""}, "has no config.json"),
        ([], {"config.json": b"{}"}, "has no model.safetensors: its weights are incomplete"),
        ([], {name: MODEL[name] for name in MODEL if name != SHARDS[2]}, f"has no {SHARDS[2]}"),
        (
            [],
            {
                "config.json": b"{}",
                "model.safetensors.index.json": b'{"weight_map": {"a": "../b.safetensors"}}',
            },
            "names '../b.safetensors', which is no name of a shard",
        ),
        ([], MODEL | {"SHA256SUMS": b"<html>"}, "a line of SHA256SUMS is '<html>'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_source_is_named(
    serve: Any, place: Path, statuses: list[int], files: dict[str, bytes], complaint: str
) -> None:
    server = serve(on(files))
    server.statuses = statuses
    with pytest.raises(FetchError, match=complaint):
        fetch(server.url, place)
    assert not place.exists()


def test_after_its_time_a_fetch_ends_and_says_how_to_go_on(serve: Any, place: Path) -> None:
    server = serve(on(MODEL))
    server.statuses = [404] + [503] * 100
    with pytest.raises(DeadlineError, match=r"config.json has not come within 0.05 s: run the command again"):
        fetch(server.url, place, timeout_s=0.05)


@pytest.mark.parametrize("how", ["foreign", "other", "incomplete"])
def test_a_directory_that_has_something_else_is_left_alone(serve: Any, place: Path, how: str) -> None:
    server = serve(on(MODEL) | {f"v2/{name}": content for name, content in MODEL.items()})
    if how == "foreign":
        place.mkdir(parents=True)
        complaint = "is there and was not fetched by this command"
    else:
        fetch(server.url, place)
        complaint = f"has the model of {server.url}/model, not of {server.url}/v2"
    if how == "incomplete":
        (place / SHARDS[1]).unlink()
        complaint = f"{SHARDS[1]} is missing"
    with pytest.raises(FetchError, match=complaint):
        fetch(HttpSource(f"{server.url}/v2"), place)


def test_a_folder_is_a_source_too(tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, content in (MODEL | NOT_READ).items():
        (source / name).write_bytes(content)
    assert main(["fetch-model", f"file:{source}", str(place)]) == 0
    assert contents(place) == MODEL
    assert "6 files" in capsys.readouterr().out
    assert main(["fetch-model", f"file:{source}", str(place)]) == 0
    assert main(["fetch-model", "file:/nowhere", str(place.with_name("b"))]) == 1
    assert "/nowhere is no directory" in capsys.readouterr().err
    assert main(["fetch-model", f"file:{source}"]) == 2
    with pytest.raises(FetchError, match="not of file:"):
        fetch(FolderSource(tmp_path), place)
