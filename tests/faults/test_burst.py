"""More requests than a decode server has room for: waiting costs time, and never a lease.

Most of them wait in the router. A few have their prompts computed meanwhile and wait on the decode server,
each under a lease, while those before them are answered: that is longer than a lease lasts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.faults.fleet import LEASE_TTL_S, Fleet

NUM_REQUESTS = 16
MAX_TOKENS = 48


@dataclass(frozen=True)
class Burst:
    """How a burst of requests fared."""

    num_failed: int
    num_wrong: int
    num_retries: float
    num_expired: int
    """Leases that ran out."""
    num_thrown_away: int
    """Reads that came after the release."""
    seconds: float


CLEAN = {"num_failed": 0, "num_wrong": 0, "num_retries": 0, "num_expired": 0, "num_thrown_away": 0}


def burst(fleet: Fleet, requests, count: int) -> Burst:
    bodies, expected = requests.make(count, num_prompt=60, max_tokens=MAX_TOKENS)

    def counts() -> tuple[float, int, int]:
        logs = "".join(server.log for server in fleet.servers.values())
        retries = sum(fleet.retries("two-prefill").values())
        return (
            retries,
            len(re.findall("its lease expired", logs)),
            len(re.findall("the lease ended while", logs)),
        )

    before = counts()
    with fleet.fault("slow-steps"):
        replies = [one.result() for one in [fleet.send("two-prefill", body) for body in bodies]]
    answered = [
        (reply, tokens) for reply, tokens in zip(replies, expected, strict=True) if reply.status == 200
    ]
    retries, expired, thrown_away = (now - then for now, then in zip(counts(), before, strict=True))
    return Burst(
        num_failed=len(replies) - len(answered),
        num_wrong=sum(reply.token_ids != tokens for reply, tokens in answered),
        num_retries=retries,
        num_expired=int(expired),
        num_thrown_away=int(thrown_away),
        seconds=max(reply.seconds for reply in replies),
    )


def test_16_requests_at_a_decode_server_with_room_for_four(fleet, requests, table):
    result = burst(fleet, requests, NUM_REQUESTS)
    assert vars(result) == CLEAN | {"seconds": result.seconds}
    assert result.seconds > 1.5 * LEASE_TTL_S, "nobody waited for long: the test shows nothing"
    fault = f"{NUM_REQUESTS} requests at a decode server with room for 4, leases of {LEASE_TTL_S:g} s"
    table.add(
        fault,
        "two prefill servers",
        f"{NUM_REQUESTS} exact answers, no retry",
        "the queue; leases are renewed",
        result.seconds,
    )


def test_without_renewal_the_burst_loses_its_leases(fleet, requests):
    """What the test above would see if waiting requests let their leases run out."""
    with fleet.fault("no-renewal"):
        result = burst(fleet, requests, NUM_REQUESTS // 2)
    assert result.num_wrong == 0, "a late read can be slow; it can't be wrong"
    assert min(result.num_expired, result.num_retries) > 0
