"""Requests that meet a fault. They are sent at the same time through every pairing of servers.

The decode servers are frozen until all prompts are leased, so that the fault happens at the moment that a
test's name says.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from testing.conditions import PROMPT_S, wait_until
from testing.faults.exact_requests import Requests
from testing.faults.fleet import Fleet, Reply
from testing.faults.reliability_table import Table

ROUTERS = ("two-prefill", "two-prefill", "local", "alone")
"""Of two requests through ``two-prefill``, each prefill server gets one."""
LEASED = {"prefill-a": 3, "prefill-b": 1}
SERVERS = {
    "two-prefill": "two prefill servers",
    "local": "one, `--local-prefill`",
    "alone": "one prefill server",
}
EXACT = "the exact answer"
RETRIES = "3 attempts"


@dataclass
class Asked:
    """Running requests by router, and the answers that an undisturbed server gave to the same requests."""

    fleet: Fleet
    replies: list[Future[Reply]]
    expected: list[list[int]]

    def exact(self, router: str) -> float:
        """Asserts exact answers through this router. Returns the seconds of the slowest answer."""
        seconds = []
        for name, future, tokens in zip(ROUTERS, self.replies, self.expected, strict=True):
            if name == router:
                reply = future.result()
                assert (reply.status, reply.error) == (200, ""), router
                assert reply.token_ids == tokens, router
                seconds.append(reply.seconds)
        return max(seconds)

    def exact_elsewhere(self, fault: str, bound: str, table: Table) -> None:
        """Asserts exact answers from routers that can do without ``prefill-a``, and records how the answers
        came about."""
        ways = {"two-prefill": "from the other server", "local": "prefilled where it is decoded"}
        for router, way in ways.items():
            seconds = self.exact(router)
            assert seconds < PROMPT_S
            table.add(fault, SERVERS[router], f"{EXACT}, {way}", bound, seconds)

    def reply(self, router: str) -> Reply:
        return self.replies[ROUTERS.index(router)].result()


def ask_all(fleet: Fleet, requests: Requests, max_tokens: int = 24) -> Asked:
    """Sends all requests. All prompts are leased, all but one by prefill-a. The decode servers are frozen."""
    bodies, expected = requests.make(len(ROUTERS), max_tokens=max_tokens)
    for name in ("decode", "decode-local"):
        fleet[name].freeze()
    replies = [fleet.send(router, body) for router, body in zip(ROUTERS, bodies, strict=True)]
    for name, count in LEASED.items():
        fleet.leased(name, count)
    return Asked(fleet, replies, expected)


def thaw_decode(fleet: Fleet) -> None:
    for name in ("decode", "decode-local"):
        fleet[name].thaw()


def until_all_read(fleet: Fleet) -> None:
    """Waits until the reads from prefill-a have been posted; after that, only prefill-a can delay them."""
    wait_until(lambda: fleet.stats("decode-local").transfers_in_flight == 1, "decode-local reads")
    wait_until(lambda: fleet.stats("decode").transfers_in_flight == 2, "decode reads")
