"""Processes of two releases next to each other serve together, and answer as those of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from testing.fleets.moving import TIMEOUT_S, stream, until_begun
from testing.fleets.releases import (
    FIRST_START_DEADLINE_S,
    LATER,
    TODAY,
    Processes,
    Release,
    last,
    processes,
)

pytestmark = pytest.mark.in_clear  # its processes start without a stack


FLAGS = ("--threads", "1", "--max-model-len", "512", "--max-num-seqs", "16", "--cache-memory", "0.1")
NUM_REQUESTS = 12
NUM_TOKENS = 200


@dataclass
class Pair:
    """A prefill and a decode server of two releases, and a router of each release."""

    running: Processes
    releases: tuple[Release, Release]
    prefill: tuple[str, str]
    decode: tuple[str, str]

    def router(self, release: int, prefill: int, decode: int) -> str:
        return self.running.router(self.releases[release], [self.prefill[prefill]], [self.decode[decode]])


def pair(running: Processes, releases: tuple[Release, Release]) -> Pair:
    first, second = releases
    return Pair(
        running,
        releases,
        (running.server(first, "prefill"), running.server(second, "prefill")),
        (running.server(first, "decode"), running.server(second, "decode")),
    )


LAST = pytest.param("last", marks=[pytest.mark.exhaustive, pytest.mark.timeout(2 * FIRST_START_DEADLINE_S)])


@pytest.fixture(scope="module", params=["later", LAST])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    other = LATER
    if request.param == "last":
        try:
            other = last(request.config.cache.mkdir("releases"))
        except LookupError as error:
            pytest.skip(f"the last release's commit is not in this clone: {error}")
    with processes(tmp_path_factory.mktemp("logs"), *FLAGS) as running:
        yield pair(running, (TODAY, other))


def bodies() -> list[dict[str, object]]:
    return [
        {
            "prompt": [(7 * i + j) % 400 + 6 for j in range(1 + 17 * i)],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            **({"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i, "top_p": 0.9}),
        }
        for i in range(NUM_REQUESTS)
    ]


def answers(url: str, then: Callable[[], None] = lambda: None) -> list[str]:
    """Sends all requests at once, calls ``then`` once all answers have begun, and returns the answers."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        asked = [pool.submit(stream, url, body, begun) for body in bodies()]
        until_begun(begun, NUM_REQUESTS)
        then()
        return [answer.result(timeout=TIMEOUT_S) for answer in asked]


def test_every_pairing_gives_the_same_tokens(servers: Pair) -> None:
    """The router, the prefill and the decode server are each of one of two releases."""
    pairings = [(0, 0, 0), (0, 1, 1), (1, 0, 0), (0, 0, 1), (0, 1, 0)]
    urls = [servers.router(*pairing) for pairing in pairings]
    for url in urls:
        servers.running.until_ready(url)
    expected, *others = map(answers, urls)
    for pairing, found in zip(pairings[1:], others, strict=True):
        assert found == expected, pairing
    for address in servers.prefill + servers.decode:
        log = servers.running.log(address)
        assert "wire.rpc" not in log, log


def test_answers_move_to_servers_of_the_other_release(servers: Pair) -> None:
    """Today's servers stop amid a rollout, and those of the other release take over."""
    in_turn = ("--decode-policy", "round_robin")  # else all answers may run on the server that goes on
    router = servers.running.router(TODAY, list(servers.prefill), list(servers.decode), *in_turn)
    servers.running.until_ready(router)

    def stop_one_release() -> None:
        for address in (servers.prefill[0], servers.decode[0]):
            servers.running.signal(address, signal.SIGTERM)

    expected = answers(router)
    with servers.running.slow_steps():  # else the answers might end before the servers stop
        assert answers(router, stop_one_release) == expected
    assert "requests move to other servers" in servers.running.log(servers.decode[0])
