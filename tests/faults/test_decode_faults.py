"""A decode server that dies while it reads, one that is late, and one whose message is lost."""

from __future__ import annotations

import time

from testing.conditions import PROMPT_S, wait_until
from testing.faults.fleet import LEASE_TTL_S

LEASE_TTL = "`--lease-ttl`"
EXACT = "the exact answer"


def num_expired(fleet):
    """Leases of both prefill servers that have expired since the servers started."""
    return sum(fleet.stats(name).leases_ended["expired"] for name in ("prefill-a", "prefill-b"))


def test_killed_in_mid_transfer(fleet, requests, table):
    """One router sees the death. The other router is frozen, so its lease can only expire."""
    bodies, expected = requests.make(3)
    expired_before = num_expired(fleet)
    fleet["decode"].freeze()
    alone = fleet.send("alone", bodies[0])
    replies = [fleet.send("two-decode", body) for body in bodies[1:]]
    wait_until(lambda: any(reply.done() for reply in replies), "decode-local answers")
    fleet.leased("prefill-a", 2)
    fleet["two-decode"].freeze()
    with fleet.nobody_waits("alone"):
        with fleet.fault("dies-in-read"):
            fleet["decode"].thaw()
            wait_until(lambda: not fleet["decode"].is_alive, "decode has died while it read")
        died = time.monotonic()
        reply = alone.result()
    assert (reply.status, reply.seconds < PROMPT_S) == (503, True)
    assert "decode server" in reply.error
    fault = "decode server killed during the read"
    table.add(fault, "one decode server", "503, no decode server is connected", "3 attempts", reply.seconds)
    fleet.leased("prefill-a", 0)
    seconds = time.monotonic() - died
    # On a busy machine the other router's lease may have run out as well, before that router could end it.
    wait_until(lambda: num_expired(fleet) > expired_before, "the lease ended by its time to live")
    frozen = f"{fault}, its router frozen"
    table.add(frozen, "any", "nothing yet; the lease ends and blocks are free", LEASE_TTL, seconds)
    fleet["two-decode"].thaw()
    for reply, tokens in zip((one.result() for one in replies), expected[1:], strict=True):
        assert (reply.status, reply.token_ids) == (200, tokens)
    table.add(
        fault, "two decode servers", f"{EXACT}, from the other server", "3 attempts", time.monotonic() - died
    )


def test_a_lease_that_expired_before_the_read(fleet, requests, table):
    """The reader was frozen for longer than its leases live, and could not renew them."""
    bodies, expected = requests.make(2)
    retries = fleet.retries("alone").get("transfer_failed", 0)
    expired_before = num_expired(fleet)
    fleet["decode"].freeze()
    replies = [fleet.send("alone", body) for body in bodies]
    fleet.leased("prefill-a", 2)
    fleet.leased("prefill-a", 0)
    wait_until(lambda: num_expired(fleet) == expired_before + 2, "both have run out")
    fleet["decode"].thaw()
    thawed = time.monotonic()
    for reply, tokens in zip((one.result() for one in replies), expected, strict=True):
        assert (reply.status, reply.token_ids) == (200, tokens)
    seconds = time.monotonic() - thawed
    assert fleet.retries("alone")["transfer_failed"] == retries + 2
    fault = "decode server frozen until the leases had expired"
    table.add(fault, "any", f"{EXACT}; what was read late is thrown away", "3 attempts", seconds)


def test_a_notification_that_is_lost_or_late(fleet, requests, table):
    """The data is valid: the answer arrives at once, and the lease expires.

    The first request's notification arrives when the second's lease may have its cell.
    """
    bodies, expected = requests.make(2)
    faults = ("notification of a read lost", "notification of a read late: its lease had ended")
    outcome = f"{EXACT}, at once; the lease ends"
    with fleet.fault("late-done"):
        for fault, body, tokens in zip(faults, bodies, expected, strict=True):
            sent = time.monotonic()
            reply = fleet.send("alone", body).result()
            assert (reply.status, reply.token_ids) == (200, tokens)
            assert fleet.stats("prefill-a").leases_held == 1
            fleet.leased("prefill-a", 0)
            seconds = time.monotonic() - sent
            assert seconds > LEASE_TTL_S
            table.add(fault, "any", outcome, LEASE_TTL, seconds)
