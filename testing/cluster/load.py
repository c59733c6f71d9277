"""Clients that ask a Service one thing after another while something happens to its pods."""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

NUM_CLIENTS = 2
REQUEST_TIMEOUT_S = 120.0
MAX_TOKENS = 48
PROMPTS = [f'def function_{i}(items, limit={i}):\n    """' for i in range(4)]


@dataclass(frozen=True)
class Row:
    """What happened, and what clients saw meanwhile: a row of the table."""

    what: str
    seconds: float
    num_requests: int
    slowest_s: float
    """How long the slowest of the requests took."""
    errors: list[str]
    """HTTP statuses other than 200, broken connections, and answers that are not those of before."""


@dataclass
class Load:
    """The clients, and the answers that are right."""

    url: Callable[[], str]
    """Returns the Service's address, once there is a Service."""
    answers: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    trust: ssl.SSLContext | None = None
    """How clients check certificates, once the Service speaks HTTPS."""

    def learn(self, url: str) -> None:
        """Learns the right answers from another server."""
        for prompt in PROMPTS:
            self.answers[prompt] = asked(url, prompt)

    @contextmanager
    def during(self, what: str) -> Iterator[Clients]:
        """Keeps asking while the caller does something, and adds a row to the table."""
        clients = Clients(self)
        began_s = time.monotonic()
        try:
            yield clients
        finally:
            clients.stop()
            seconds = time.monotonic() - began_s
            num_requests = clients.num_answers + len(clients.errors)
            row = Row(what, seconds, num_requests, clients.slowest_s, clients.errors)
            self.rows.append(row)
            print(
                f"{what}: {row.seconds:.0f} s, {row.num_requests} requests, the slowest took "
                f"{row.slowest_s:.1f} s, {len(row.errors)} errors",
                flush=True,
            )


class Clients:
    """Threads, each with one request at a time."""

    def __init__(self, load: Load) -> None:
        self._url = load.url()
        self._trust = load.trust
        self._answers = load.answers
        self._is_over = threading.Event()
        self.num_answers = 0
        self.slowest_s = 0.0
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=[i]) for i in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets requests that run come to their end."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, first: int) -> None:
        prompts = itertools.islice(itertools.cycle(PROMPTS), first, None)
        while not self._is_over.is_set():
            began_s = time.monotonic()
            error = self._asked(next(prompts))
            with self._lock:
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                if error:
                    self.errors.append(error)
                else:
                    self.num_answers += 1
            if error:
                self._is_over.wait(1.0)  # or a server that refuses would be asked a thousand times a second

    def _asked(self, prompt: str) -> str:
        """Returns what was wrong, empty if nothing was."""
        try:
            answer = asked(self._url, prompt, self._trust)
        except (httpx.HTTPError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        expected = self._answers[prompt]
        return "" if answer == expected else f"{prompt!r} was answered {answer!r}, not {expected!r}"


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    lines = ["| what happened | seconds | requests | slowest | errors |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.what} | {row.seconds:.0f} | {row.num_requests} | {row.slowest_s:.1f} s | {len(row.errors)} |"
        for row in rows
    ]
    return "\n".join(lines)


def asked(url: str, prompt: str, trust: ssl.SSLContext | None = None) -> str:
    """Asks for a completion, greedily, over a connection of its own: that is what a Service balances."""
    body = {"model": "bundled_model", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    with httpx.Client(timeout=REQUEST_TIMEOUT_S, verify=trust or True) as client:
        answer = client.post(f"{url}/v1/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length", choice
    return str(choice["text"])
