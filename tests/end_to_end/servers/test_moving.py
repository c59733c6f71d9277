"""A decode server stops, dies or drains during answers: clients see no gap and no token twice."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from testing.deploy.kubernetes_api import NAMESPACE, api_in_thread
from testing.fleets.moving import (
    NUM_REQUESTS,
    TIMEOUT_S,
    TOKEN,
    admin,
    decode_workers,
    is_drained,
    num_retries,
    stream,
    until_begun,
    until_both_serve,
)
from testing.fleets.router_view import total
from testing.fleets.stack import running_router, slowed_stack

NUM_TOKENS = 100
FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "32", "--cache-memory", "0.1", "--threads", "1")


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    token_file = tmp_path_factory.mktemp("admin") / "token"
    token_file.write_text(TOKEN)
    flags = ("--decode", "2", "--speculative", "2", "--admin-token-file", str(token_file), *FLAGS)
    with slowed_stack("up", *flags) as running:
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


@pytest.mark.parametrize(
    ("kind", "signum"),
    [
        pytest.param("greedy", signal.SIGTERM, id="stops", marks=pytest.mark.exhaustive),
        pytest.param("sampled", signal.SIGKILL, id="dies"),
    ],
)
def test_answers_go_on_at_another_server_when_theirs(stack, kind, signum):
    asked = bodies(kind)
    until_both_serve(stack)
    expected = [stream(stack.url, body) for body in asked]
    begun, retries = threading.Semaphore(0), num_retries(stack.url)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        with stack.slow_steps():
            answers = [pool.submit(stream, stack.url, body, begun) for body in asked]
            until_begun(begun)
            pid = stack.kill("decode-0", signum)
        got = [answer.result(timeout=TIMEOUT_S) for answer in answers]
    assert got == expected
    if signum == signal.SIGTERM:
        assert num_retries(stack.url) == retries, "states were handed over; nothing was computed twice"
    else:
        assert num_retries(stack.url) > retries
    stack.wait_until(lambda: stack.has_restarted("decode-0", pid), "the supervisor has restarted the server")
    stack.wait_until(stack.is_idle, "nothing is left of the requests")


@pytest.mark.exhaustive
def test_answers_of_a_server_that_stops_wait_for_one_that_is_only_late(stack):
    """The only other server says nothing for some seconds, as on a machine that is too busy to run it."""
    asked = [body | {"max_tokens": 400} for body in bodies("greedy")]
    until_both_serve(stack)
    expected = [stream(stack.url, body) for body in asked]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        with stack.slow_steps():
            answers = [pool.submit(stream, stack.url, body, begun) for body in asked]
            until_begun(begun)
            stack.kill("decode-1", signal.SIGSTOP)
            try:
                stack.wait_until(
                    lambda: total(stack.url, "twinfang_servers_connected") == 2, "the router misses decode-1"
                )
                pid = stack.kill("decode-0", signal.SIGTERM)
                stack.wait_until(lambda: total(stack.url, "twinfang_choices_held") > 0, "answers wait")
            finally:
                stack.kill("decode-1", signal.SIGCONT)
        assert [answer.result(timeout=TIMEOUT_S) for answer in answers] == expected
    stack.wait_until(lambda: stack.has_restarted("decode-0", pid), "the supervisor has restarted the server")
    stack.wait_until(stack.is_idle, "nothing is left of the requests")


@pytest.mark.parametrize("kind", ["sampled", pytest.param("greedy", marks=pytest.mark.exhaustive)])
def test_answers_go_on_at_another_server_when_theirs_is_drained_and_undrained(stack, kind):
    """To and fro under load: what the first one lets go may come back to it from the second."""
    asked = bodies(kind)
    until_both_serve(stack)
    expected = [stream(stack.url, body) for body in asked]
    begun, retries = threading.Semaphore(0), num_retries(stack.url)
    first, second = decode_workers(stack)
    with ThreadPoolExecutor(2 * NUM_REQUESTS) as pool:
        with stack.slow_steps():
            answers = [pool.submit(stream, stack.url, body, begun) for body in asked]
            until_begun(begun)
            assert admin(stack, "POST", f"/workers/{first}/drain")["state"] in ("draining", "drained")
            later = [pool.submit(stream, stack.url, body) for body in asked]
            stack.wait_until(lambda: is_drained(stack, first), "it has let go of all")
            assert admin(stack, "POST", f"/workers/{first}/undrain")["state"] == "serving"
            admin(stack, "POST", f"/workers/{second}/drain")
        assert [answer.result(timeout=TIMEOUT_S) for answer in answers] == expected
        assert [answer.result(timeout=TIMEOUT_S) for answer in later] == expected
    assert num_retries(stack.url) == retries, "states were handed over; nothing was computed twice"
    requests = admin(stack, "GET", f"/requests?limit={2 * NUM_REQUESTS}")["requests"]
    timelines = [admin(stack, "GET", f"/requests/{one['id']}")["timeline"] for one in requests]
    moves = [sum(event["name"] == "moved" for event in timeline) for timeline in timelines]
    assert sum(moves) >= NUM_REQUESTS / 4, "about half of them were on the first server"
    with httpx.Client(base_url=stack.url, timeout=TIMEOUT_S) as client:
        body = asked[0] | {"max_tokens": 2}
        for _ in range(4):
            assert client.post("/v1/completions", json=body).status_code == 200
    newest = admin(stack, "GET", "/requests?limit=4")["requests"]
    assert {one["decode_worker"] for one in newest} == {first}, "nothing new goes where it drains"
    admin(stack, "POST", f"/workers/{second}/undrain")
    stack.wait_until(stack.is_idle, "nothing is left of the requests")


@pytest.mark.exhaustive
@pytest.mark.in_clear  # its drain hook gets no certificate
def test_answers_go_on_at_another_server_when_theirs_is_a_pod_that_is_deleted(stack, tmp_path):
    """With a router that follows pods, and the same servers."""
    asked = bodies("sampled")[: NUM_REQUESTS // 2]
    until_both_serve(stack)
    expected = [stream(stack.url, body) for body in asked]
    first, _ = decode_workers(stack).values()
    with api_in_thread() as (api, do):
        names = {}
        for process in stack.processes().values():
            if process.name != "router":
                role, port = process.name.split("-")[0], process.address.rpartition(":")[2]
                do(api.create_pod, process.name, role=role, port=port)
                names[process.address] = process.name
        begun = threading.Semaphore(0)
        flags = ("--kubernetes-namespace", NAMESPACE, "--kubeconfig", str(api.kubeconfig(tmp_path / "kube")))
        with running_router(*flags) as url, ThreadPoolExecutor(NUM_REQUESTS) as pool:
            stack.wait_until(lambda: total(url, "twinfang_servers_connected") == 3, "all pods are connected")
            with stack.slow_steps():
                answers = [pool.submit(stream, url, body, begun) for body in asked]
                until_begun(begun, len(asked))
                do(api.delete_pod, names[first["address"]])
                stack.wait_until(lambda: is_drained(stack, first["id"]), "all have left")
            later = [pool.submit(stream, url, body) for body in asked]
            assert [answer.result(timeout=TIMEOUT_S) for answer in (*answers, *later)] == expected * 2
            assert is_drained(stack, first["id"]), "nothing new went there"
            assert num_retries(url) == 0, "states were handed over; nothing was computed twice"
    admin(stack, "POST", f"/workers/{first['id']}/undrain")
    stack.wait_until(stack.is_idle, "nothing is left of the requests")


def test_where_there_is_no_other_server_answers_end_where_they_are(stack):
    body = bodies("greedy")[0] | {"max_tokens": 800}
    until_both_serve(stack)
    expected = stream(stack.url, body)
    first, second = decode_workers(stack)
    admin(stack, "POST", f"/workers/{first}/drain")
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        with stack.slow_steps():
            answer = pool.submit(stream, stack.url, body, begun)
            until_begun(begun, 1)
            assert admin(stack, "POST", f"/workers/{second}/drain")["state"] == "draining"
            refused = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert refused.status_code == 503
        assert "no decode server is ready" in refused.json()["error"]["message"]
        assert "undrain" in admin(stack, "GET", "/pools")["problem"], "what to do is the operator's to know"
        assert answer.result(timeout=TIMEOUT_S) == expected
    for worker in (first, second):
        admin(stack, "POST", f"/workers/{worker}/undrain")
    assert stream(stack.url, body) == expected


def drain(address, timeout):
    command = [sys.executable, "-m", "twinfang", "drain", address, "--timeout", timeout]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.in_clear  # the command gets no certificate
def test_the_drain_command_returns_once_a_server_has_nothing_left(stack):
    body = bodies("greedy")[0]
    until_both_serve(stack)
    expected = stream(stack.url, body)
    first, second = decode_workers(stack)
    admin(stack, "POST", f"/workers/{second}/drain")
    begun = threading.Semaphore(0)
    address = decode_workers(stack)[first]["address"]
    with ThreadPoolExecutor(1) as pool:
        with stack.slow_steps():
            answer = pool.submit(stream, stack.url, body | {"max_tokens": 800}, begun)
            until_begun(begun, 1)
            given_up = drain(address, "0.01")
        assert given_up.returncode == 1
        assert f"{address} is not drained after 0.01 s: 1 requests run" in given_up.stderr
        assert drain(address, "60").returncode == 0
        (name,) = [one.name for one in stack.processes().values() if one.address == address]
        assert stack.stats(name)[name].num_running == 0
        assert answer.result(timeout=TIMEOUT_S)[1] == 800
    stack.wait_until(lambda: is_drained(stack, first), "the router has seen it")
    (request,) = admin(stack, "GET", "/requests?limit=1")["requests"]
    timeline = admin(stack, "GET", f"/requests/{request['id']}")["timeline"]
    assert "moved" not in {event["name"] for event in timeline}, "it ended where it was"
    for worker in (first, second):
        admin(stack, "POST", f"/workers/{worker}/undrain")
    assert stream(stack.url, body) == expected


@pytest.mark.exhaustive
def test_what_one_router_drains_another_one_s_answers_leave_as_well(stack):
    asked = bodies("sampled")[: NUM_REQUESTS // 2]
    until_both_serve(stack)
    expected = [stream(stack.url, body) for body in asked]
    first, _ = decode_workers(stack)
    servers = [process for process in stack.processes().values() if process.name != "router"]
    flags = [part for one in servers for part in (f"--{one.name.split('-')[0]}", one.address)]
    begun = threading.Semaphore(0)
    with running_router(*flags) as url, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        with stack.slow_steps():
            answers = [pool.submit(stream, url, body, begun) for body in asked]
            until_begun(begun, len(asked))
            admin(stack, "POST", f"/workers/{first}/drain")
            stack.wait_until(lambda: is_drained(stack, first), "all have left")
        later = [pool.submit(stream, url, body) for body in asked]
        assert [answer.result(timeout=TIMEOUT_S) for answer in answers] == expected
        assert [answer.result(timeout=TIMEOUT_S) for answer in later] == expected
        assert is_drained(stack, first)
        assert num_retries(url) == 0
        admin(stack, "POST", f"/workers/{first}/undrain")
    stack.wait_until(stack.is_idle, "nothing is left of the requests")
