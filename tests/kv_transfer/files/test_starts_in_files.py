"""Cached prefixes in files: after a restart the same tokens, and fewer of them computed."""

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from itertools import count
from multiprocessing import get_context

import pytest

from engine.files.tier_settings import FileCache
from testing.checkpoints.families import make_family_checkpoint
from testing.conditions import wait_until
from testing.kv_transfer.filing import BLOCK, answers, conversations, filing, num_cached
from wire.errors import ConfigError
from wire.messages.sessions import NAME_BYTES, TendSession

WAIT_S = 30.0


def settings(directory, num_bytes=64 << 20, **more):
    return FileCache(directory, num_bytes, **{"wait_s": WAIT_S, **more})


def segments(directory):
    return sorted(directory.glob("*/*.segment"))


def fill(model_dir, files, prompts, **more):
    """Run prompts until all that host memory has is in files. Returns the answers."""
    with filing(model_dir, files, **more) as one:
        expected = answers(one.run(prompts))
        one.settle()
        assert one.figures.written > 3
        assert not any(one.figures.failures.values()), one.figures.failures
        assert one.figures.used_bytes <= files.num_bytes
    return expected


def check_restart(model_dir, files, prompts, **more):
    with filing(model_dir, None, **{**more, "cache_mode": "none"}) as plain:
        expected = answers(plain.run(prompts))
    assert fill(model_dir, files, prompts, **more) == expected
    with filing(model_dir, files, **more) as again:
        found = again.run(prompts)
        assert answers(found) == expected
        assert again.figures.read > 3
        assert num_cached(found) > 10 * BLOCK
        assert not any(again.figures.failures.values()), again.figures.failures
        owned = again.engine.scheduler.owned
        assert owned.cache.num_available_blocks == owned.blocks.capacity
        assert owned.cache.num_available_slots == owned.slots.capacity


@pytest.mark.parametrize("mode", ["all", pytest.param("align", marks=pytest.mark.exhaustive)])
def test_a_server_that_starts_again_finds_what_it_has_written(bundled_model, tmp_path, mode):
    check_restart(bundled_model, settings(tmp_path), conversations(8, 1), cache_mode=mode)
    folder = segments(tmp_path)[0].parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama", "mamba-2", "qwen3-next", "falcon-h1"])
def test_models_of_other_families_and_those_with_kv_or_states_alone(tmp_path, model):
    model_dir = make_family_checkpoint(tmp_path / "model", model, seed=3)
    more = {"cached_states": None} if model == "llama" else {}
    check_restart(model_dir, settings(tmp_path / "files"), conversations(8, 2, seed=9), **more)


def test_an_encrypted_file_shows_no_keys_and_other_keys_find_nothing(bundled_model, tmp_path):
    prompts = conversations(8, 1, seed=2)
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32)
    files = settings(tmp_path / "files", key_file=key_file)
    check_restart(bundled_model, files, prompts)
    with filing(bundled_model, files) as one:
        keys = set(one.store.index._blocks)
    data = b"".join(path.read_bytes() for path in segments(tmp_path / "files"))
    assert keys
    assert not any(key in data for key in keys)
    key_file.write_text("cd" * 32)
    with filing(bundled_model, files) as other:
        assert num_cached(other.run(prompts[:1])) == 0
        assert other.figures.failures["foreign"] > 0


def test_another_salt_finds_nothing_in_files(bundled_model, tmp_path):
    prompts, files = conversations(8, 1, seed=3), settings(tmp_path)
    with filing(bundled_model, files) as one:
        one.run(prompts, cache_salt="a")
        one.settle()
    with filing(bundled_model, files) as again:
        assert num_cached(again.run(prompts, cache_salt="b")) == 0
        assert again.figures.read == 0
        assert num_cached(again.run(prompts, cache_salt="a")) > 0
        assert again.figures.read > 0


def test_a_request_is_computed_when_reading_takes_longer(bundled_model, tmp_path):
    prompts, files = conversations(8, 1, seed=4), settings(tmp_path, wait_s=0.0)
    expected = fill(bundled_model, files, prompts)
    with filing(bundled_model, files) as again:
        again.store.bytes_per_s = 1.0
        found = again.run(prompts)
        assert answers(found) == expected
        assert again.figures.read == 0
        assert again.figures.computed > 0


def test_a_request_waits_no_longer_than_its_time_for_files_that_do_not_come(bundled_model, tmp_path):
    """The files' thread is busy for as long as the request runs."""
    prompts, files = conversations(8, 1, seed=5), settings(tmp_path, wait_s=0.1)
    expected = fill(bundled_model, files, prompts)
    with filing(bundled_model, files) as again:
        goes_on = threading.Event()
        again.store._thread.post(goes_on.wait)
        found = again.run(prompts[:1])
        assert answers(found) == expected[:1]
        assert (again.figures.late, num_cached(found)) == (1, 0)
        goes_on.set()
        again.settle()
        assert again.figures.read == 1
        found = again.run(prompts[:1])
        assert num_cached(found) > 0


def size_of(directory):
    return sum(path.stat().st_size for path in segments(directory))


def fill_forever(model_dir, files):
    """Run other prompts after other prompts, in a process of its own."""
    with filing(model_dir, files) as one:
        for seed in count():
            one.run(conversations(8, 1, seed=seed))
            one.settle()


def damage(path, place, kind):
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[place] ^= 0x10
        path.write_bytes(data)
    else:
        os.truncate(path, place)


def places(directory, step=64 << 10):
    """One place in every 64 KB of every segment, and some at its beginning."""
    for path in segments(directory):
        size = path.stat().st_size
        yield from (
            (path.name, place) for place in (0, 9, 40, 100, 513, 530, *range(700, size, step), size - 1)
        )


@pytest.fixture(scope="module")
def filled(bundled_model, tmp_path_factory):
    """A directory with files, the prompts and the answers. Each test works with a copy."""
    directory = tmp_path_factory.mktemp("filled")
    prompts = conversations(4, 2, seed=6)
    return directory, prompts, fill(bundled_model, settings(directory), prompts)


def failed_by(figures):
    return {name for name, count in figures.failures.items() if count}


def check_damaged(bundled_model, directory, prompts, expected):
    with filing(bundled_model, settings(directory)) as one:
        assert answers(one.run(prompts)) == expected
        one.settle()
        figures = one.figures
    with filing(bundled_model, settings(directory)) as again:
        assert answers(again.run(prompts)) == expected
        assert num_cached(again.run(prompts)) > 0
    return figures


@pytest.mark.parametrize("kind", ["flip", "truncate"])
@pytest.mark.parametrize("share", [0.3])
def test_a_damaged_file_is_a_miss(bundled_model, tmp_path, filled, kind, share):
    directory, prompts, expected = filled
    copy = shutil.copytree(directory, tmp_path / "copy")
    for path in segments(copy):
        damage(path, int(path.stat().st_size * share), kind)
    figures = check_damaged(bundled_model, copy, prompts, expected)
    assert failed_by(figures)
    assert failed_by(figures) <= {"damaged", "torn", "gone"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["flip", "truncate"])
def test_damage_in_every_64_kb_is_a_miss(bundled_model, tmp_path, filled, kind):
    directory, prompts, expected = filled
    all_places = list(places(directory))
    assert len(all_places) > 10
    for number, (name, place) in enumerate(all_places):
        copy = shutil.copytree(directory, tmp_path / f"copy{number}")
        (path,) = [path for path in segments(copy) if path.name == name]
        damage(path, place, kind)
        figures = check_damaged(bundled_model, copy, prompts, expected)
        assert failed_by(figures) <= {"damaged", "torn", "foreign", "gone"}
        shutil.rmtree(copy)


@pytest.mark.exhaustive
def test_a_server_that_is_killed_while_it_writes_leaves_nothing_wrong(bundled_model, tmp_path):
    """It is killed twice, when the files have grown. A record that it was writing is torn."""
    files = settings(tmp_path)
    with filing(bundled_model, None, cache_mode="none") as plain:
        expected = [answers(plain.run(conversations(8, 1, seed=seed))) for seed in range(3)]
    num_bytes = 0
    for _ in range(2):
        process = get_context("spawn").Process(target=fill_forever, args=(bundled_model, files))
        process.start()
        wait_until(lambda least=num_bytes: size_of(tmp_path) > least + 1_500_000, "it writes", 60)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        num_bytes = size_of(tmp_path)
    with filing(bundled_model, files) as again:
        assert failed_by(again.figures) <= {"torn"}
        num_found = []
        for seed in range(3):
            found = again.run(conversations(8, 1, seed=seed))
            assert answers(found) == expected[seed]
            num_found.append(num_cached(found))
        assert all(num_found[:2]), "3 MB hold the first two; of the third a record may be torn"
        assert failed_by(again.figures) <= {"torn"}


def test_files_of_another_model_are_foreign(bundled_model, tmp_path, filled):
    directory, prompts, expected = filled
    copy = shutil.copytree(directory, tmp_path / "copy")
    for path in segments(copy):
        data = path.read_bytes()
        fingerprint = data[56:120]
        path.write_bytes(data.replace(fingerprint, fingerprint[::-1]))
    with filing(bundled_model, settings(copy)) as one:
        found = one.run(prompts[:2])
        assert answers(found) == expected[:2]
        assert one.figures.failures["foreign"] == len(segments(directory))
        assert one.figures.read == 0


def test_a_directory_that_is_removed_while_the_server_runs_is_forgotten(bundled_model, tmp_path, filled):
    directory, prompts, expected = filled
    copy = shutil.copytree(directory, tmp_path / "copy")
    with filing(bundled_model, settings(copy)) as one:
        shutil.rmtree(copy)
        found = one.run(prompts)
        assert answers(found) == expected
        assert one.figures.read == 0
        assert one.figures.failures["gone"] > 0
        one.settle()
        assert one.figures.written > 0
        assert segments(copy)


def test_a_full_disk_stops_writing_and_nothing_else(bundled_model, tmp_path):
    prompts = conversations(8, 1, seed=7)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with filing(bundled_model, settings(tmp_path)) as one:
            found = one.run(prompts)
            again = one.run(prompts)
            assert one.figures.failures["full"] > 0
            assert answers(again) == answers(found)
            assert num_cached(again) > 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_oldest_files_go_when_the_size_is_reached(bundled_model, tmp_path):
    prompts, files = conversations(8, 1, seed=8), settings(tmp_path, num_bytes=600_000)
    expected = fill(bundled_model, files, prompts)
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= files.num_bytes
    with filing(bundled_model, files) as again:
        found = again.run(prompts)
        assert answers(found) == expected
        assert again.figures.read > 0
        assert found[0].measured.num_cached == 0
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= files.num_bytes


def test_old_files_go(bundled_model, tmp_path, filled):
    directory, prompts, _ = filled
    copy = shutil.copytree(directory, tmp_path / "copy")
    with filing(bundled_model, settings(copy, max_age_s=1e-6)) as one:
        assert not segments(copy)
        assert num_cached(one.run(prompts[:1])) == 0


def test_two_servers_share_a_directory(bundled_model, tmp_path):
    """Locks belong to processes: here the second server is another process."""
    files = settings(tmp_path)
    code = (
        "import sys; from pathlib import Path; from kv_transfer.files.directory import Directory\n"
        "from engine.files.start_files import StartForm\n"
        "print(Directory.take(Path(sys.argv[1]), StartForm(sys.argv[2], sys.argv[3], 1, 1)).path.name)"
    )
    with filing(bundled_model, files) as one:
        form = one.store._form
        command = [sys.executable, "-c", code, str(tmp_path), form.fingerprint, form.layout]
        other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert other == one.store._segments._directory.path.name[:-1] + "1"


@pytest.mark.parametrize(
    ("files", "more", "message"),
    [
        ({"num_bytes": 0}, {}, "needs a size"),
        ({"max_age_s": 0.0}, {}, "`file_cache_max_age` must be positive, got 0"),
        ({"wait_s": -1.0}, {}, "`file_cache_wait` must be at least 0, got -1"),
        ({}, {"host_cache_bytes": 0}, "needs `host_cache_bytes`"),
        ({"num_bytes": 100}, {}, "`file_cache_bytes` gives a rank 100 bytes, which hold no cached prefix"),
    ],
)
def test_files_that_nothing_could_use_are_refused(bundled_model, tmp_path, files, more, message):
    with (
        pytest.raises(ConfigError, match=message),
        filing(bundled_model, settings(tmp_path, **files), **more),
    ):
        pass


def test_a_directory_that_can_not_be_used_is_named(bundled_model, tmp_path):
    (tmp_path / "file").write_text("")
    message = "`file_cache_dir` .*/file/x can't be used: Not a directory"
    with pytest.raises(ConfigError, match=message), filing(bundled_model, settings(tmp_path / "file" / "x")):
        pass


def test_a_sessions_start_from_a_file_comes_back_early_and_is_exact(bundled_model, tmp_path):
    """What comes back before any request reads it has no owner yet, and the sanitizer takes it as it is."""
    (turn, *others), session = conversations(8, 1), "a" * 2 * NAME_BYTES
    files = settings(tmp_path)
    with filing(bundled_model, None, cache_mode="none") as plain:
        expected = answers(plain.run([[*turn, 7, 8, 9]]))
    fill(bundled_model, files, [turn, *others])
    with filing(bundled_model, files) as again:
        again.run([[*turn, 5]], session=session)
        assert again.figures.read >= 1
        again.run(others)  # the device gives the session's start up
        promoted = again.engine.measures.host_cache.promoted
        assert again.engine.tend(TendSession(session, "prefetch")).num_starts == 1
        assert again.engine.measures.host_cache.promoted == promoted + 1
        found = again.run([[*turn, 7, 8, 9]], session=session)
        assert answers(found) == expected
        assert num_cached(found) >= len(turn) - 2 * BLOCK
