"""A batch of real processes that are killed: every line is answered once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from testing.batch_files import check_each_once, lines, num_lines, request, write_requests
from testing.conditions import wait_until
from testing.fleets.stack import Stacks

SMALL = ("--cache-memory", "0.1", "--max-model-len", "512")
TIMEOUT_S = 120.0


@contextmanager
def batch(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running ``twinfang batch`` on the files of ``folder``; what it says goes to a file there."""
    command = [sys.executable, "-m", "twinfang", "batch", str(folder / "in.jsonl")]
    with (folder / "said").open("ab") as said:
        process = subprocess.Popen(
            [*command, "--output", str(folder / "out.jsonl"), *flags],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def kill_at(folder: Path, num_answers: int, *flags: str) -> int:
    """Runs a batch and kills it when so many lines are answered. Returns how many there are then."""
    with batch(folder, *flags) as process:

        def far_enough() -> bool:
            assert process.poll() is None, (folder / "said").read_text()
            return num_lines(folder / "out.jsonl") >= num_answers

        wait_until(far_enough, f"{num_answers} lines are answered", TIMEOUT_S, interval_s=0.005)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
        psutil.wait_procs(children, TIMEOUT_S)
        assert not any(child.is_running() for child in children), "its stack has ended with it"
    return num_lines(folder / "out.jsonl")


def finish(folder: Path, *flags: str) -> str:
    """Runs the batch to its end, and returns what it says."""
    start = (folder / "said").stat().st_size if (folder / "said").exists() else 0
    with batch(folder, *flags) as process:
        code = process.wait(3 * TIMEOUT_S)
    said = (folder / "said").read_bytes()[start:].decode()
    assert code == 0, said
    return said


def test_a_killed_batch_continues_and_answers_each_line_once(stacks: Stacks, tmp_path: Path):
    stack = stacks("serve", *SMALL)
    requests = [request(number) for number in range(150)]
    write_requests(tmp_path / "in.jsonl", requests)
    flags = ("--base-url", stack.url, "--concurrency", "8")
    at_first_kill = kill_at(tmp_path, 20, *flags)
    assert at_first_kill < len(requests)
    with (tmp_path / "out.jsonl").open("rb+") as file:  # as if the write was cut short
        file.truncate(file.seek(0, 2) - 7)
    said = finish(tmp_path, *flags)
    assert f"{at_first_kill - 1} of 150 lines" in said
    check_each_once(requests, lines(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert "150 answers of 150 lines" in finish(tmp_path, *flags)
    stack.wait_until(stack.is_idle, "what the killed batch has asked for is given up")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("servers", [(), ("--prefill", "1", "--decode", "2")], ids=["both", "pair"])
def test_two_thousand_lines_killed_three_times_on_stacks_of_its_own(servers: tuple[str, ...], tmp_path: Path):
    requests = [request(number) for number in range(2000)]
    write_requests(tmp_path / "in.jsonl", requests)
    flags = (*SMALL, *servers)
    at_kills = [kill_at(tmp_path, num_answers, *flags) for num_answers in (300, 900, 1500)]
    print("answered at the kills:", at_kills)
    assert at_kills[-1] < len(requests)
    print(finish(tmp_path, *flags))
    check_each_once(requests, lines(tmp_path / "out.jsonl"))
