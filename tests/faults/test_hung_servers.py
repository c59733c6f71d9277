"""An engine that hangs, and a process that is frozen, as a kubelet's liveness probe sees them: the probe
fails, no drain holds up the end of the server, and its answers go on elsewhere exactly."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urljoin

import httpx
import pytest

from testing.fleets.clients import all_at_once, greedy_body, one_at_a_time
from testing.fleets.stack import slowed_stack

pytestmark = pytest.mark.exhaustive

NUM_TOKENS = 64
HANG_DEADLINE_S = 2.0
DRAIN_S = 120
"""The chart's `drainSeconds`."""
PROBE_TIMEOUT_S = 1.0
RESTART_DEADLINE_S = 60.0
FLAGS = (
    *("--decode", "2", "--decode-policy", "round_robin", "--hang-deadline", str(HANG_DEADLINE_S)),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--cache-memory", "0.05", "--threads", "1"),
)


@pytest.fixture(scope="module")
def stack():
    with slowed_stack("up", *FLAGS) as stack:
        yield stack
        assert stack.stop() == 0


def liveness(process):
    """Status and text of the server's answer to a probe; None if there is no answer in time."""
    try:
        answer = httpx.get(urljoin(process.metrics_url, "/healthz"), timeout=PROBE_TIMEOUT_S)
    except httpx.TimeoutException:
        return None
    return answer.status_code, answer.text


def find_hung(stack):
    """The first decode server whose liveness probe fails, and what it said."""
    for name, process in stack.processes().items():
        if name.startswith("decode") and (answer := liveness(process)) is not None and answer[0] == 503:
            return process, answer[1]
    return None


def test_a_server_whose_engine_hangs_is_replaced_before_its_drain_would_end(stack, table):
    choose = random.Random(11)
    prompts = [[choose.randrange(6, 900) for _ in range(length)] for length in (2, 40, 90, 33)]
    bodies = [greedy_body(prompt, NUM_TOKENS) for prompt in prompts]
    expected = asyncio.run(one_at_a_time(stack, bodies))
    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool, stack.fault("slow-steps"), stack.fault("hanging-step"):
        answers = pool.submit(lambda: asyncio.run(all_at_once(stack, bodies)))
        stack.wait_until(lambda: find_hung(stack), "a liveness probe fails", RESTART_DEADLINE_S)
        hung, said = find_hung(stack)
        assert said.startswith("the engine hangs: a step has lasted for ")
        assert "/healthz says so with status 503" in stack.log
        hook = [sys.executable, "-m", "twinfang", "drain", f"--server={hung.address}", f"--timeout={DRAIN_S}"]
        drained = subprocess.run(hook, capture_output=True, timeout=DRAIN_S / 2, check=False)
        assert drained.returncode == 1
        stack.kill(hung.name)
        tokens = [answer.token_ids for answer in answers.result()]
    assert tokens == [answer.token_ids for answer in expected]
    seconds = time.monotonic() - began_s
    stack.wait_until(
        lambda: stack.has_restarted(hung.name, hung.pid), "the server is ready again", RESTART_DEADLINE_S
    )
    assert liveness(stack.processes()[hung.name]) == (200, "ok\n")
    outcome = "the exact answer, from the other server"
    fault = "decode server's engine hangs, its liveness probe has it killed"
    table.add(fault, "two decode servers", outcome, "`--hang-deadline`", seconds)


def test_a_frozen_server_answers_no_probe_until_it_goes_on(stack):
    server = stack.processes()["decode-0"]
    assert liveness(server) == (200, "ok\n")
    stack.kill("decode-0", signal.SIGSTOP)
    try:
        assert liveness(server) is None
    finally:
        stack.kill("decode-0", signal.SIGCONT)
    stack.wait_until(lambda: liveness(server) == (200, "ok\n"), "its liveness probe succeeds again")
