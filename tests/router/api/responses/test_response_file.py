"""The store: who may see a response, for how long, and how much there may be of all."""

import contextlib
import logging
import sqlite3
import stat
import subprocess
import sys
import time

import pytest

from router.api.responses import response_file
from router.api.responses.response_file import MAX_SHARE, ROW_BYTES, ResponseFile
from router.api.responses.response_store import StoredResponse
from wire.errors import (
    ConfigError,
    InvalidRequestError,
    PreviousResponseError,
    UnavailableError,
    UnknownIdError,
)

MIB = 1 << 20
DAY_S = 24 * 3600.0


def stored(response_id, previous_id=None, *, size=0):
    return StoredResponse(response_id, previous_id, b'{"a":1}', b"[]", b"x" * size)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "responses"


@pytest.fixture
def make_store(path, clock):
    made = []

    def make(**settings):
        store = ResponseFile(path, **({"max_bytes": MIB, "ttl_s": DAY_S, "clock": clock} | settings))
        store.open()
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


async def ids_of(store, owner, *ids):
    """Those of the ids that are stored."""
    found = []
    for response_id in ids:
        with contextlib.suppress(UnknownIdError):
            found.append((await store.find(owner, response_id)).id)
    return found


async def test_what_is_stored_is_found_and_deleted_by_its_owner_alone(make_store):
    store = make_store()
    one = stored("r1", size=10)
    await store.save("alice", one)
    assert await store.find("alice", "r1") == one
    for call in (store.find, store.delete):
        with pytest.raises(UnknownIdError, match="no response 'r1' is stored"):
            await call("bob", "r1")
    with pytest.raises(PreviousResponseError, match="no response 'r1' is stored"):
        await store.conversation("bob", "r1")
    await store.delete("alice", "r1")
    assert await ids_of(store, "alice", "r1") == []


async def test_the_file_is_for_its_owner_alone_and_outlives_the_process(make_store, path):
    store = make_store()
    await store.save("", stored("r1"))
    for name in (path, path.with_name("responses-wal"), path.with_name("responses-shm")):
        assert stat.S_IMODE(name.stat().st_mode) == 0o600
    store.close()
    path.chmod(0o644)
    assert await ids_of(make_store(), "", "r1") == ["r1"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_conversation_is_all_that_was_continued_from_its_beginning(make_store):
    store = make_store()
    for response_id, previous in (("r1", None), ("r2", "r1"), ("r3", "r2"), ("other", "r1")):
        await store.save("", stored(response_id, previous))
    assert [one.id for one in await store.conversation("", "r3")] == ["r1", "r2", "r3"]
    assert [one.id for one in await store.conversation("", "other")] == ["r1", "other"]
    await store.delete("", "r2")
    with pytest.raises(PreviousResponseError, match="'r3' continues 'r2', which is no longer stored"):
        await store.conversation("", "r3")


async def test_what_is_not_used_expires_and_a_conversation_that_goes_on_does_not(make_store, clock):
    store = make_store()
    for response_id, previous in (("r1", None), ("r2", "r1"), ("r3", None)):
        await store.save("", stored(response_id, previous))
    clock.now += 0.75 * DAY_S
    await store.find("", "r3")  # to read is not to use
    await store.conversation("", "r2")
    clock.now += 0.5 * DAY_S
    assert await ids_of(store, "", "r1", "r2", "r3") == ["r1", "r2"]


async def test_what_has_expired_is_in_the_file_no_longer(make_store, clock, path):
    store = make_store()
    num = response_file.PURGED_AT_ONCE + 3
    for i in range(num):
        await store.save("", StoredResponse(f"r{i}", None, b"{}", b"[]", b"secret words"))
    clock.now += 2 * DAY_S
    await store.purge()
    store.close()
    assert b"secret words" not in path.read_bytes()
    with sqlite3.connect(path) as connection:
        for table in ("responses", "contents", "owners"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


async def test_the_oldest_of_whoever_has_most_go_first(make_store, clock):
    size = MIB // MAX_SHARE - ROW_BYTES - 9
    store = make_store()
    await store.save("bob", stored("b1", size=size))
    mine = [f"a{i}" for i in range(2 * MAX_SHARE)]
    for response_id in mine:
        clock.now += 1
        await store.save("alice", stored(response_id, size=size))
    assert await ids_of(store, "alice", *mine) == mine[-(MAX_SHARE - 1) :]
    assert await ids_of(store, "bob", "b1") == ["b1"]


async def test_there_are_no_more_responses_than_allowed(make_store, clock):
    store = make_store(max_responses=3)
    for i in range(5):
        clock.now += 1
        await store.save("", stored(f"r{i}"))
    assert await ids_of(store, "", *(f"r{i}" for i in range(5))) == ["r2", "r3", "r4"]


async def test_of_too_many_responses_those_of_whoever_has_most_go(make_store, clock):
    store = make_store(max_responses=6)
    await store.save("bob", stored("b1", size=20_000))
    for i in range(9):
        clock.now += 1
        await store.save("alice", stored(f"a{i}"))
    assert await ids_of(store, "bob", "b1") == ["b1"]
    assert await ids_of(store, "alice", *(f"a{i}" for i in range(9))) == ["a4", "a5", "a6", "a7", "a8"]


async def test_a_response_that_is_too_large_is_not_stored(make_store, caplog):
    store = make_store()
    await store.save("", stored("r1", size=MIB // MAX_SHARE))
    assert await ids_of(store, "", "r1") == []
    assert "is not stored: raise --response-store-size" in caplog.text


async def test_a_conversation_that_is_too_long_is_refused(make_store, monkeypatch):
    monkeypatch.setattr(response_file, "MAX_CONVERSATION", 2)
    store = make_store()
    for response_id, previous in (("r1", None), ("r2", "r1"), ("r3", "r2"), ("r4", "r3"), ("r5", "r4")):
        await store.save("", stored(response_id, previous))
    assert len(await store.conversation("", "r2")) == 2
    for response_id in ("r3", "r5"):
        with pytest.raises(InvalidRequestError, match="the limits are 2 and"):
            await store.conversation("", response_id)
    monkeypatch.setattr(response_file, "MAX_CONVERSATION_BYTES", ROW_BYTES)
    with pytest.raises(InvalidRequestError, match="begin a new conversation"):
        await store.conversation("", "r1")


@pytest.mark.parametrize("contents", [b"no database" * 100, None])
async def test_a_file_of_another_kind_is_refused_at_the_start(path, contents):
    if contents is None:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE a (b)")
        connection.close()
    else:
        path.write_bytes(contents)
    before = path.read_bytes()
    store = ResponseFile(path, max_bytes=MIB, ttl_s=DAY_S)
    with pytest.raises(ConfigError, match="give another --response-store, or delete the file"):
        store.open()
    store.close()
    assert path.read_bytes() == before


async def test_a_folder_that_is_not_there_is_named(tmp_path):
    store = ResponseFile(tmp_path / "nowhere" / "responses", max_bytes=MIB, ttl_s=DAY_S)
    with pytest.raises(ConfigError, match="nowhere"):
        store.open()
    store.close()


async def test_a_disk_that_is_full_is_logged_and_later_responses_are_stored(make_store, caplog):
    store = make_store()
    limit = "PRAGMA max_page_count = 20"
    await store._run(lambda connection: connection.execute(limit).fetchone())
    with caplog.at_level(logging.ERROR):
        await store.save("", stored("r1", size=MIB // MAX_SHARE - 2 * ROW_BYTES))
    assert "response r1 is not stored: " in caplog.text
    assert "database or disk is full" in caplog.text
    await store.save("", stored("r2"))
    assert await ids_of(store, "", "r1", "r2") == ["r2"]


async def test_a_file_that_breaks_is_an_error_until_it_is_whole(make_store, path):
    store = make_store()
    await store.save("", stored("r1"))
    await store._run(lambda connection: connection.execute("ALTER TABLE contents RENAME TO gone"))
    with pytest.raises(UnavailableError) as refused:
        await store.find("", "r1")
    assert str(path) in refused.value.message
    assert str(path) not in refused.value.public
    await store._run(lambda connection: connection.execute("ALTER TABLE gone RENAME TO contents"))
    assert await ids_of(store, "", "r1") == ["r1"]


WRITER = """
import asyncio, sys
from pathlib import Path
from router.api.responses.response_file import ResponseFile
from router.api.responses.response_store import StoredResponse

async def main(path, name):
    store = ResponseFile(Path(path), max_bytes=1 << 20, ttl_s=1e6)
    store.open()
    for i in range(30):
        previous = f"{name}{i - 1}" if i else None
        await store.save("", StoredResponse(f"{name}{i}", previous, b"{}", b"[]", b"[]"))
        await store.conversation("", f"{name}{i}")
    store.close()

asyncio.run(main(*sys.argv[1:]))
"""


OPENER = """
import sys
from pathlib import Path
from router.api.responses.response_file import _opened

print("ready", flush=True)
sys.stdin.readline()
for i in range(50):
    _opened(Path(f"{sys.argv[1]}{i}")).close()
"""


def test_processes_make_a_file_at_the_same_time(path):
    command = [sys.executable, "-c", OPENER, str(path)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    openers = [subprocess.Popen(command, text=True, **pipes) for _ in range(4)]
    for opener in openers:
        assert opener.stdout.readline() == "ready\n"
    for opener in openers:
        opener.stdin.write("go\n")
        opener.stdin.flush()
    for opener in openers:
        _, errors = opener.communicate(timeout=60)
        assert (opener.returncode, errors) == (0, "")


async def test_processes_share_a_file(make_store, path):
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name], stderr=subprocess.PIPE) for name in "ab"]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert (writer.returncode, errors) == (0, b"")
    store = make_store(clock=time.time)
    for name in "ab":
        found = await store.conversation("", f"{name}29")
        assert [one.id for one in found] == [f"{name}{i}" for i in range(30)]
