"""What a router notes in its audit log, and what it does not."""

import asyncio
import json
import subprocess
import sys
import threading

import httpx
import pytest

from router.access import key_file
from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.access.key_limits import LIMIT_NAMES, MAX_LIMIT, KeyLimits
from router.audit.audit_log import MAX_PENDING, MAX_REFUSAL_KINDS, AuditLog
from router.audit.chain_file import ChainFile
from router.audit.line import MAX_LINE_BYTES
from router.audit.repeats import FIRST_WINDOW_S, LONGEST_WINDOW_S, Repeats
from router.audit.verification import verify
from testing.conditions import TIMEOUT_S, until, wait_until
from testing.router.router_processes import HEADERS, real_processes
from testing.router.scripted_servers import saying

ALICE, VIEWER = new_key(), new_key()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    lines = [ApiKey("alice", digest_of(ALICE)), ApiKey("viewer", digest_of(VIEWER), role="view")]
    file.write_text("\n".join(map(key_line, lines)))
    return file


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(path, event):
    return [record for record in records(path) if record["event"] == event]


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


async def test_no_prompt_and_no_key_is_in_the_file(make_stack, path, keys, monkeypatch):
    monkeypatch.setattr(key_file, "LOOK_INTERVAL_S", 0.02)
    stack = await make_stack(audit_log=path, api_keys_file=keys)
    stack.decode[0].script = saying([300])
    headers = bearer(ALICE)
    body = {"model": "tiny", "prompt": "my-secret-prompt", "max_tokens": 1}
    assert (await stack.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    wrong = bearer("x")
    assert (await stack.client.post("/v1/completions?a=b", json=body, headers=wrong)).status_code == 401
    bob = new_key()
    keys.write_text(key_line(ApiKey("bob", digest_of(bob), min_priority=3, role="operate")))
    await until(lambda: of(path, "keys_changed"))
    (change,) = of(path, "keys_changed")
    assert [text.split()[0] for text in change["before"]] == ["alice", "viewer"]
    assert change["after"] == [f"bob {digest_of(bob).hex()[:12]} min_priority=3 role=operate"]
    text = path.read_text()
    for secret in ("my-secret-prompt", ALICE, bob, digest_of(bob).hex(), "a=b"):
        assert secret not in text


async def test_no_key_of_a_large_change_is_left_out(make_stack, path, keys, monkeypatch):
    """Lists and texts of a line are cut. The last key's name and its role have to be there all the same."""
    monkeypatch.setattr(key_file, "LOOK_INTERVAL_S", 0.02)
    await make_stack(audit_log=path, api_keys_file=keys)
    limits = KeyLimits(*[MAX_LIMIT] * len(LIMIT_NAMES))
    names = [f"{number:064}" for number in range(300)]
    many = [ApiKey(name, digest_of(name), -(10**9), limits, "configure") for name in names]
    keys.write_text("\n".join(map(key_line, many)))
    await until(lambda: len(of(path, "keys_changed")) == 3)
    told = [text.split() for change in of(path, "keys_changed") for text in change["after"]]
    assert [text[0] for text in told] == names
    assert all("role=configure" in text for text in told)
    longest = max(path.read_bytes().splitlines(), key=len)
    assert len(longest) < MAX_LINE_BYTES
    assert verify([path]).fault == ""


class FailingFile:
    """A file on a disk that is full until there is room again."""

    def __init__(self):
        self.lines, self.is_full = [], True

    def append(self, written):
        if self.is_full:
            raise OSError("No space left on device")
        self.lines += written
        return len(self.lines)


class SlowFile:
    """A file on a disk that takes its time."""

    def __init__(self):
        self.lines, self.num_calls, self.may_write = [], 0, threading.Event()

    def append(self, written):
        self.num_calls += 1
        assert self.may_write.wait(TIMEOUT_S)
        self.lines += written
        return len(self.lines)


async def test_a_log_ends_wherever_it_is_cancelled_and_has_each_line_once(path):
    file = ChainFile(path)
    for turns in range(30):
        log = AuditLog(file, 0)
        running = asyncio.create_task(log.run())
        await asyncio.sleep(0)
        log.note("act")
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running], timeout=TIMEOUT_S)
        assert running.cancelled(), f"after {turns} turns of the loop"
        assert [record["event"] for record in records(path)][-3:] == ["started", "act", "stopped"]
        assert len(records(path)) == 3 * (turns + 1)
    file.close()


async def test_a_write_that_has_begun_is_not_begun_again_when_the_log_ends():
    file = SlowFile()
    log = AuditLog(file, 0)
    running = asyncio.create_task(log.run())
    await until(lambda: file.num_calls)
    running.cancel()
    await asyncio.sleep(0.05)
    file.may_write.set()
    await asyncio.wait([running], timeout=TIMEOUT_S)
    assert [record["event"] for record in file.lines] == ["started", "stopped"]


async def test_while_the_disk_is_full_acts_go_on_and_a_bounded_number_of_lines_waits(caplog):
    file = FailingFile()
    log = AuditLog(file, 0)
    for number in range(MAX_PENDING + 5):
        log.note("act", number=number)
        if number % 100 == 0:
            await log.written()
    assert caplog.text.count("can't be written") == 1
    file.is_full = False
    await log.written()
    assert [record["number"] for record in file.lines[:MAX_PENDING]] == list(range(MAX_PENDING))
    assert file.lines[MAX_PENDING:][0] | {"event": "lost", "lines": 5} == file.lines[-1]


def test_a_client_that_hammers_for_a_week_fills_no_disk():
    """From one address or from many, it gets some lines an hour."""
    clock = [0.0]
    repeats = Repeats(MAX_REFUSAL_KINDS, {"event": "others"}, lambda: clock[0])
    lines, total = 0, 0
    for number in range(7 * 24 * 60):
        clock[0] = number * 60.0
        if clock[0] >= repeats.ends_s:
            counts = repeats.counts()
            lines += len(counts)
            total += sum(record["repeated"] for record in counts)
        for address in range(20):
            passed = repeats.note(address, {"from": address})
            lines, total = lines + passed, total + passed
    total += sum(record["repeated"] for record in repeats.counts())
    assert total == 7 * 24 * 60 * 20, "all are counted"
    assert lines < 7 * 24 * (2 * MAX_REFUSAL_KINDS + 1) + 200
    assert FIRST_WINDOW_S < LONGEST_WINDOW_S


@pytest.mark.exhaustive
def test_real_processes_write_one_chain_and_the_command_verifies_it(tmp_path, path):
    flags = ("--decode", "127.0.0.1:1", "--audit-log", str(path), "--state-file", str(tmp_path / "state"))
    with real_processes(tmp_path, 2, flags) as processes:
        wait_until(lambda: path.exists() and len(of(path, "started")) == 2, "both processes run", 60.0)
        with httpx.Client(headers=HEADERS, timeout=20.0) as client:
            for queue in range(6):
                url = f"{processes.own_url(queue % 2)}/admin/v1/config"
                wait_until(
                    lambda url=url, queue=queue: _patched(client, url, queue), "the process answers", 60.0
                )
    acts = of(path, "call")
    assert {act["process"] for act in acts} == {0, 1}
    assert len(of(path, "stopped")) == 2
    command = [sys.executable, "-m", "twinfang", "audit", "verify", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{len(records(path))} lines are as they were written" in found.stdout
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], *lines[4:]]))
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert f"{path}, line 4: line 4 is missing before it" in found.stderr


def _patched(client, url, queue):
    try:
        return client.patch(url, json={"max_queue": queue}).status_code == 200
    except httpx.TransportError:
        return False
