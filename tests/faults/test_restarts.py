"""Servers die and are started again by ``twinfang up``: clients see no error, no gap and no token twice."""

from __future__ import annotations

import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest

from testing.fleets.stack import running_stack

NUM_CLIENTS = 6
NUM_BODIES = 12
TIMEOUT_S = 60.0
RESTART_DEADLINE_S = 60.0
FLAGS = ("--max-model-len", "512", "--max-num-seqs", "16", "--cache-memory", "0.05", "--threads", "1")
FLAGS += ("--hold-s", str(RESTART_DEADLINE_S))
"""A restart takes some five seconds, and far more than the default's fifteen on a machine that is loaded."""


def make_bodies():
    choose = random.Random(9)
    return [
        {
            "prompt": [choose.randrange(6, 900) for _ in range(choose.randint(2, 300))],
            "max_tokens": 64,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": i % 3 != 0,
        }
        for i in range(NUM_BODIES)
    ]


def ask(client, url, body):
    """Returns the answer's tokens, or a description of what is wrong with it."""
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            text = response.read().decode()
    except httpx.TransportError as error:
        return f"broken: {error!r}"
    if response.status_code != 200:
        return f"{response.status_code}: {text}"
    if not body["stream"]:
        return json.loads(text)["choices"][0]["token_ids"]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events or events.pop() != "[DONE]":
        return f"broken off: {text[-300:]}"
    said = [json.loads(event) for event in events]
    errors = [event["error"] for event in said if "error" in event]
    return (
        f"in the stream: {errors}"
        if errors
        else [token for event in said for choice in event["choices"] for token in choice["token_ids"]]
    )


@dataclass
class Clients:
    """Each sends one request after the other until :attr:`done` is set."""

    url: str
    bodies: list
    expected: list
    done: threading.Event = field(default_factory=threading.Event)
    num_answered: int = 0
    num_started: int = 0
    wrong: list = field(default_factory=list)

    def run(self, number):
        with httpx.Client(timeout=TIMEOUT_S) as client:
            turn = number * len(self.bodies) // NUM_CLIENTS
            while not self.done.is_set():
                index = turn % len(self.bodies)
                self.num_started += 1
                answer = ask(client, self.url, self.bodies[index])
                if answer != self.expected[index]:
                    self.wrong.append((index, answer))
                self.num_answered += 1
                turn += 1


def under_load(stack, disturb):
    """Returns what clients received while ``disturb(clients)`` ran."""
    bodies = make_bodies()
    with httpx.Client(timeout=TIMEOUT_S) as client:
        expected = [ask(client, stack.url, body) for body in bodies]
    assert all(len(tokens) == 64 for tokens in expected), expected
    clients = Clients(stack.url, bodies, expected)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        running = [pool.submit(clients.run, number) for number in range(NUM_CLIENTS)]
        try:
            disturb(clients)
        finally:
            clients.done.set()
        for one in running:
            one.result()
    return clients


def kill_and_await(stack, clients, name):
    """Kills a server while all clients wait for answers; returns once all are served again."""
    begun = clients.num_started
    stack.wait_until(lambda: clients.num_started >= begun + NUM_CLIENTS, "all clients are at it")
    pid = stack.kill(name)
    stack.wait_until(lambda: stack.has_restarted(name, pid), f"{name} is back", RESTART_DEADLINE_S)
    answered = clients.num_answered
    stack.wait_until(lambda: clients.num_answered >= answered + NUM_CLIENTS, "answers come again")


def num_used(stack, role):
    """Servers of a role that the router uses."""
    page = httpx.get(f"{stack.url}/metrics", timeout=TIMEOUT_S).text
    return float(page.partition(f'twinfang_servers_connected{{role="{role}"}} ')[2].partition("\n")[0])


def freeze_until_missed(stack, clients, role):
    """Freezes a server, and thaws it once the router has missed it; returns once all are served again."""
    stack.kill(f"{role}-0", signal.SIGSTOP)
    try:
        stack.wait_until(lambda: num_used(stack, role) == 0, f"the router misses {role}-0")
    finally:
        stack.kill(f"{role}-0", signal.SIGCONT)
    stack.wait_until(lambda: num_used(stack, role) == 1, f"the router uses {role}-0")
    answered = clients.num_answered
    stack.wait_until(lambda: clients.num_answered >= answered + NUM_CLIENTS, "answers come again")


def test_a_restart_of_the_only_server_of_a_role_is_not_seen():
    with running_stack("up", *FLAGS) as stack:

        def disturb(clients):
            for name in ("prefill-0", "decode-0"):
                kill_and_await(stack, clients, name)

        assert under_load(stack, disturb).wrong == []
        stack.wait_until(stack.is_idle, "nothing is left of the requests")


@pytest.mark.exhaustive
def test_a_freeze_of_the_only_server_of_a_role_is_not_seen_but_by_the_router():
    with running_stack("up", *FLAGS) as stack:

        def disturb(clients):
            for role in ("prefill", "decode"):
                freeze_until_missed(stack, clients, role)

        assert under_load(stack, disturb).wrong == []
        stack.wait_until(stack.is_idle, "nothing is left of the requests")


@pytest.mark.exhaustive
def test_random_kills_of_two_servers_of_each_role_are_not_seen():
    choose = random.Random(10)
    with running_stack("up", "--prefill", "2", "--decode", "2", *FLAGS) as stack:

        def disturb(clients):
            names = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(2)]
            for _ in range(3):
                choose.shuffle(names)
                for name in names:
                    stack.wait_until(lambda name=name: name in stack.processes(), f"{name} runs")
                    if choose.random() < 0.5:
                        kill_and_await(stack, clients, name)
                    else:
                        stack.kill(name)

        assert under_load(stack, disturb).wrong == []
        stack.wait_until(stack.is_idle, "nothing is left of the requests")
