"""A decode server that stops or dies in the midst of answers: clients see neither a gap nor a token twice."""

from __future__ import annotations

import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.stack import running_stack

NUM_REQUESTS = 12
NUM_TOKENS = 100
FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "32", "--cache-memory", "0.1", "--threads", "1")


@pytest.fixture(scope="module")
def stack():
    with running_stack("up", "--decode", "2", "--speculative", "2", *FLAGS) as running:
        yield running


def bodies(kind):
    choose = random.Random(kind)
    params = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "frequency_penalty": 0.3}}[kind]
    return [
        {
            "prompt": [choose.randrange(6, 900) for _ in range(choose.randint(2, 200))],
            "max_tokens": NUM_TOKENS,
            "seed": i,
            **({"guided_regex": "([a-z]{2,9}, ){80}"} if i % 4 == 3 else {"ignore_eos": True}),
            **params,
        }
        for i in range(NUM_REQUESTS)
    ]


def stream(url, body, begun=None):
    """A streamed answer's text and number of tokens; ``begun`` is released at its third chunk."""
    texts, usage = [], None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | options, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            texts += [choice["text"] for choice in event["choices"]]
            usage = event.get("usage") or usage
            if begun is not None and len(texts) == 3:
                begun.release()
    return "".join(texts), usage["completion_tokens"]


def is_restarted(stack, pid):
    decode = stack.processes().get("decode-0")
    return decode is not None and decode.pid != pid and stack.is_ready()


def num_retries(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("twinfang_request_retries_total{")
    )


@pytest.mark.parametrize(
    ("kind", "signum"), [("greedy", signal.SIGTERM), ("sampled", signal.SIGKILL)], ids=["stops", "dies"]
)
def test_answers_go_on_at_another_server_when_theirs(stack, kind, signum):
    asked = bodies(kind)
    stack.wait_until(stack.is_ready, "all servers are connected")
    expected = [stream(stack.url, body) for body in asked]
    begun, retries = threading.Semaphore(0), num_retries(stack.url)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [pool.submit(stream, stack.url, body, begun) for body in asked]
        for _ in range(NUM_REQUESTS):
            assert begun.acquire(timeout=60)
        pid = stack.kill("decode-0", signum)
        got = [answer.result(timeout=60) for answer in answers]
    assert got == expected
    if signum == signal.SIGTERM:
        assert num_retries(stack.url) == retries, "states were handed over; nothing was computed twice"
    else:
        assert num_retries(stack.url) > retries
    stack.wait_until(lambda: is_restarted(stack, pid), "the supervisor has restarted the server")
    stack.wait_until(stack.is_idle, "nothing is left of the requests")
