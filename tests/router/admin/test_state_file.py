"""Changes made by the admin API are kept for the router's next start."""

import resource
import sqlite3
import stat
from contextlib import closing, contextmanager

import pytest

from router.admin import state_file
from router.admin.ledger import Entry
from router.admin.state_file import StateFile
from testing.conditions import until
from testing.router.admin_calls import get, ids, patch, post
from wire.errors import ConfigError


def test_only_its_owner_can_use_a_new_file(tmp_path):
    """Who can write it chooses the servers that get everybody's prompts."""
    path = tmp_path / "state.db"
    saved = StateFile(path)
    saved.load()
    saved.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_changes_survive_a_restart(make_admin_stack, tmp_path):
    state_file = tmp_path / "state.db"
    first = await make_admin_stack(num_decode=3, state_file=state_file)
    kept, drained, removed = await ids(first)
    addresses = {worker["id"]: worker["address"] for worker in (await get(first, "/workers"))["workers"]}
    await post(first, f"/workers/{drained}/drain")
    await until(lambda: first.decode[1].info.is_draining)  # no word of it is still under way later on
    await first.client.delete(f"/admin/v1/workers/{removed}")
    added = await post(first, "/workers", 201, address="127.0.0.1:9", role="prefill")
    await patch(first, max_choices=7, decode_policy="least_loaded")
    flags = tuple(addresses[one] for one in (kept, drained, removed))
    second = await make_admin_stack(num_decode=0, decode_addresses=flags, state_file=state_file, ready=False)
    workers = {worker["id"]: worker for worker in (await get(second, "/workers"))["workers"]}
    assert removed not in workers
    assert (workers[drained]["draining"], workers[kept]["draining"]) == (True, False)
    assert (workers[added["id"]]["added_by"], workers[kept]["added_by"]) == ("api", "flag")
    config = await get(second, "/config")
    assert (config["max_choices"], config["decode_policy"], config["prefill_policy"]) == (
        7,
        "least_loaded",
        "round_robin",
    )
    await post(second, f"/workers/{drained}/undrain")
    await until(lambda: not first.decode[1].info.is_draining)  # it is told once it is connected
    await post(second, "/workers", 201, address=addresses[removed], role="decode")
    third = await make_admin_stack(num_decode=0, decode_addresses=flags, state_file=state_file, ready=False)
    assert set(await ids(third)) == {kept, drained, removed}
    assert not any(worker["draining"] for worker in (await get(third, "/workers"))["workers"])
    await post(third, f"/workers/{kept}/drain")
    fewer = (addresses[drained],)
    fourth = await make_admin_stack(num_decode=0, decode_addresses=fewer, state_file=state_file, ready=False)
    assert kept not in await ids(fourth), "what a flag no longer names does not come back"
    assert removed in await ids(fourth), "what was added through the API does"


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be one" * 40, b"another"])
async def test_a_state_file_that_is_none_is_refused_at_the_start(tmp_path, content):
    path = tmp_path / "state.db"
    if content == b"another":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE things (name TEXT)")
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        StateFile(path).load()


@contextmanager
def on_a_full_disk(path):
    """A file that takes no byte more, whoever writes it: files of this process may not grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def replaced(path, replace):
    kept = path.rename(path.with_name("kept"))
    replace(path)
    try:
        yield
    finally:
        path.rmdir() if path.is_dir() else path.unlink()
        kept.rename(path)


FAILING_FILES = {
    "full": on_a_full_disk,
    "device": lambda path: replaced(path, lambda path: path.symlink_to("/dev/full")),
    "directory": lambda path: replaced(path, lambda path: path.mkdir()),
}


@pytest.mark.parametrize("failing", FAILING_FILES.values(), ids=FAILING_FILES)
async def test_a_change_that_can_not_be_saved_holds_with_a_warning_and_is_saved_later(
    make_admin_stack, tmp_path, monkeypatch, caplog, failing
):
    path = tmp_path / "state.db"
    monkeypatch.setattr(state_file, "RETRY_S", 0.02)
    stack = await make_admin_stack(state_file=path)
    (worker,) = await ids(stack)
    with failing(path):
        changed = await patch(stack, max_choices=3, max_queue=5)
        drained = await post(stack, f"/workers/{worker}/drain")
    for answer in (changed, drained):
        assert str(path) in answer["warning"]
        assert "will be lost when the router restarts" in answer["warning"]
    assert (changed["max_choices"], drained["draining"]) == (3, True)
    assert len([one for one in caplog.records if "will be lost" in one.getMessage()]) == 1

    async def is_saved():
        return not (await get(stack, "/config"))["warning"]

    await until(is_saved)
    saved = StateFile(path).load()
    assert dict(saved.settings) == {"max_choices": 3, "max_queue": 5}
    assert [one.state for one in saved.workers] == ["draining"]
    assert (await patch(stack, max_choices=4))["warning"] == ""


async def test_a_successful_change_saves_the_ones_before_it(make_admin_stack, tmp_path):
    path = tmp_path / "state.db"
    stack = await make_admin_stack(state_file=path)
    with FAILING_FILES["directory"](path):
        assert (await patch(stack, max_choices=3, max_queue=5))["warning"]
    assert (await patch(stack, max_choices=4))["warning"] == ""
    assert dict(StateFile(path).load().settings) == {"max_choices": 4, "max_queue": 5}


@pytest.mark.parametrize("changes_again", [True, False])
async def test_a_file_that_was_deleted_is_made_again_with_all_changes(
    make_admin_stack, tmp_path, monkeypatch, changes_again
):
    path = tmp_path / "state.db"
    before = StateFile(path)
    before.load()
    await before.save([Entry(table="settings", key=("max_queue",), values=(5,), stamp=1)])
    before.close()
    monkeypatch.setattr(state_file, "RETRY_S", 100.0 if changes_again else 0.02)
    stack = await make_admin_stack(state_file=path)
    (worker,) = await ids(stack)
    await post(stack, f"/workers/{worker}/drain")
    path.unlink()
    if changes_again:
        assert (await patch(stack, max_choices=3))["warning"] == ""
    await until(lambda: path.exists() and num_saved_workers(path))
    saved = StateFile(path).load()
    assert dict(saved.settings) == {"max_queue": 5} | ({"max_choices": 3} if changes_again else {})
    assert [one.state for one in saved.workers] == ["draining"]


def num_saved_workers(path) -> int:
    """Only looks; to load a file that is empty makes it a state file."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return 0
        return connection.execute("SELECT count(*) FROM workers").fetchone()[0]
