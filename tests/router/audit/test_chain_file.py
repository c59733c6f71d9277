"""The file of an audit log: several processes append, lines survive what may happen to a file, and every
change is found."""

import fcntl
import json
import multiprocessing
import os
import random
import stat

import pytest

from router.audit import chain_file
from router.audit.chain_file import ChainFile
from router.audit.line import START, Link, parsed, written
from router.audit.verification import verify
from wire.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


def append(path, *names):
    file = ChainFile(path)
    try:
        return file.append([{"event": name} for name in names])
    finally:
        file.close()


def lines_of(path):
    return path.read_bytes().splitlines()


def write_lines(path, lines):
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def test_lines_are_chained_over_restarts_and_only_the_owner_may_read_them(path):
    append(path, "a", "b")
    last = append(path, "c")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [json.loads(line)["event"] for line in lines_of(path)] == ["a", "b", "c"]
    verdict = verify([path])
    assert (verdict.num_lines, verdict.last, verdict.fault) == (3, last, "")


def _append_many(path, name):
    file = ChainFile(path)
    for number in range(30):
        file.append([{"event": f"{name} {number}"}])


def test_processes_that_append_at_the_same_time_make_one_chain(path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append_many, args=(path, name)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    verdict = verify([path])
    assert (verdict.num_lines, verdict.fault) == (90, "")


def test_every_changed_removed_or_moved_line_is_found(path):
    append(path, *"abcdefghij")
    lines = lines_of(path)
    choose = random.Random(1)
    for number in range(1, 11):
        for _ in range(20):  # a flipped bit anywhere
            changed = bytearray(lines[number - 1])
            changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(7)
            if b"\n" in changed:
                continue
            write_lines(path, [*lines[: number - 1], bytes(changed), *lines[number:]])
            verdict = verify([path])
            assert verdict.fault.startswith(f"{path}, line {number}: the line was changed"), verdict
            assert verdict.num_lines == number - 1
        if number < 10:
            write_lines(path, [*lines[: number - 1], *lines[number:]])
            assert verify([path]).fault.startswith(
                f"{path}, line {number}: line {number} is missing before it"
            )
            swapped = [*lines[: number - 1], lines[number], lines[number - 1], *lines[number + 1 :]]
            write_lines(path, swapped)
            assert verify([path]).fault.startswith(f"{path}, line {number}: it has number {number + 1}")
    write_lines(path, [*lines[:4], lines[1], *lines[4:]])
    assert verify([path]).fault.startswith(f"{path}, line 5: it has number 2 where 5 is due")
    write_lines(path, [*lines[:4], b"", *lines[4:]])
    assert verify([path]).fault.startswith(f"{path}, line 5: the line was changed")


def test_a_line_that_was_written_anew_with_a_right_hash_is_found_by_the_next(path):
    append(path, *"abc")
    lines = lines_of(path)
    forged, _ = written({"event": "nothing happened"}, parsed(lines[0]).link)
    write_lines(path, [lines[0], forged.rstrip(), lines[2]])
    assert verify([path]).fault.startswith(f"{path}, line 2: the line was replaced")


def test_lines_removed_at_the_end_are_found_by_a_line_that_must_be_there(path):
    last = append(path, *"abc")
    assert not verify([path], last).fault
    write_lines(path, lines_of(path)[:2])
    assert not verify([path]).fault, "the file alone can't tell"
    assert "removed" in verify([path], last).fault
    assert "replaced" in verify([path], Link(2, "0" * 64)).fault


def test_a_running_process_notices_that_lines_were_removed(path, caplog):
    file = ChainFile(path)
    file.append([{"event": "a"}, {"event": "b"}])
    write_lines(path, lines_of(path)[:1])
    file.append([{"event": "c"}])
    file.close()
    events = [json.loads(line)["event"] for line in lines_of(path)]
    assert events == ["a", "tampered", "c"]
    assert "was changed" in caplog.text


def test_a_line_that_was_cut_by_a_crash_is_told_and_the_chain_goes_on(path):
    append(path, "a", "b")
    path.write_bytes(path.read_bytes()[:-40])
    append(path, "c")
    assert not verify([path]).fault
    assert [json.loads(line)["event"] for line in lines_of(path) if line.endswith(b"}")] == [
        "a",
        "torn_line",
        "c",
    ]
    lines = lines_of(path)
    write_lines(path, [lines[0], lines[1] + b"x", *lines[2:]])
    assert verify([path]).fault.startswith(f"{path}, line 2: the line was changed")


def test_a_file_that_was_moved_away_is_followed_by_one_that_goes_on(path):
    file = ChainFile(path)
    file.append([{"event": "a"}])
    old = path.with_suffix(".old")
    path.rename(old)
    last = file.append([{"event": "b"}])
    file.close()
    assert (verify([old, path]).num_lines, verify([old, path]).last) == (2, last)
    assert "give the file before this one first" in verify([path]).fault


def test_a_frozen_process_with_the_lock_does_not_hold_up_others_for_ever(path, monkeypatch):
    monkeypatch.setattr(chain_file, "LOCK_TIMEOUT_S", 0.05)
    file = ChainFile(path)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="lock"):
            file.append([{"event": "a"}])
    assert file.append([{"event": "a"}]).seq == 1
    file.close()


def test_what_is_no_audit_log_is_refused_at_the_start(path, tmp_path):
    path.write_text("alice sha256:…\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds something else"):
        ChainFile(path)
    path.unlink()
    append(path, "a")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=f"mode 644.: chmod 600 {path}"):
        ChainFile(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for wrong in (tmp_path, tmp_path / "none" / "file", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="`audit_log`"):
            ChainFile(wrong)


def test_long_texts_are_cut(path):
    line, link = written({"what": "x" * 10_000, "after": {"a": ["y" * 10_000]}}, START)
    assert len(line) < 1000
    assert parsed(line.rstrip()).link == link


def test_a_file_that_log_rotation_has_made_becomes_its_owner_s_alone(path):
    file, old = ChainFile(path), path.with_name("audit-1.jsonl")
    try:
        file.append([{"event": "a"}])
        path.rename(old)
        path.touch()
        path.chmod(0o644)
        file.append([{"event": "b"}])
    finally:
        file.close()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (old, path)] == [0o600, 0o600]
    assert not verify([old, path]).fault
