"""A GPU that fails or hangs, by a fake: its server ends with one line and exit code 71, its answers go on
elsewhere exactly, and the supervisor starts the server again."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time

import pytest

from testing.fleets import slowed
from testing.fleets.clients import all_at_once, greedy_body, one_at_a_time
from testing.fleets.fault_folder import FOLDER_VARIABLE
from testing.fleets.stack import slowed_stack

NUM_TOKENS = 64
STEP_DEADLINE_S = 3.0
RESTART_DEADLINE_S = 60.0
SERVER = ("--max-model-len", "512", "--max-num-seqs", "8", "--cache-memory", "0.05", "--threads", "1")
FLAGS = (*("--decode", "2", "--decode-policy", "round_robin"), *SERVER)
DECODE = ("decode-0", "decode-1")
LOST = "the GPU failed: an illegal memory access was encountered"
HANGS = f"a step has not ended within --step-deadline {STEP_DEADLINE_S:g}: the GPU hangs"


@pytest.fixture(scope="module")
def bodies():
    choose = random.Random(7)
    prompts = [[choose.randrange(6, 900) for _ in range(length)] for length in (2, 40, 90, 33)]
    return [greedy_body(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def stack():
    with slowed_stack("up", *FLAGS, "--step-deadline", str(STEP_DEADLINE_S)) as stack:
        yield stack
        assert stack.stop() == 0


def one_has_ended(stack, before):
    return any(process.pid != before[name].pid for name, process in pids_of(stack).items())


def pids_of(stack):
    running = stack.processes()
    return {name: running[name] for name in DECODE if name in running}


@pytest.mark.parametrize(("fault", "line"), [("lost-gpu", LOST), ("hanging-step", HANGS)])
def test_answers_go_on_elsewhere_and_the_server_comes_back(stack, bodies, fault, line, table):
    expected = asyncio.run(one_at_a_time(stack, bodies))
    before = stack.processes()
    began = time.monotonic()
    with stack.fault("slow-steps"), stack.fault(fault):
        answers = asyncio.run(all_at_once(stack, bodies))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    seconds = time.monotonic() - began
    stack.wait_until(
        lambda: one_has_ended(stack, before), "another process replaces the server", RESTART_DEADLINE_S
    )
    stack.wait_until(stack.is_ready, "the server is ready again", RESTART_DEADLINE_S)
    stack.wait_until(stack.is_idle, "nothing is left of the requests")
    assert line in stack.log
    assert "exit code 71" in stack.log
    assert "Traceback" not in stack.log
    what, bound = {
        "lost-gpu": ("fails in a step", "3 attempts"),
        "hanging-step": ("hangs in a step", "`--step-deadline`"),
    }[fault]
    outcome = "the exact answer, from the other server"
    table.add(f"decode server's GPU {what}", "two decode servers", outcome, bound, seconds)


def test_a_start_without_enough_gpu_memory_ends_with_one_line(tmp_path):
    """A restart would fail again, so the exit code is the one of a refusal."""
    (tmp_path / "no-gpu-memory").touch()
    command = (sys.executable, "-m", slowed.MODULE, "decode", *SERVER, "--port", "0")
    ended = subprocess.run(
        [*command, "--metrics-port", "off", "--log-level", "warning"],
        env=os.environ | {FOLDER_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=RESTART_DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert (
        "2.00 GiB were asked for and 1.50 GiB are free; lower --cache-memory, --max-num-seqs" in ended.stderr
    )
    assert len(ended.stderr.splitlines()) == 1
