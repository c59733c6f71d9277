"""The bytes of a frozen prefill server arrive after the deadline, and only in memory that nobody reads."""

from __future__ import annotations

import time

from testing.conditions import wait_until
from testing.faults.fleet import ANSWER_DEADLINE_S, Fleet

NUM_VICTIMS = 3
NUM_REFILL = 4
NUM_PROMPT = 400


def late_write(fleet: Fleet, requests) -> list[str]:
    """What went wrong with the answers of a decode server whose pool was filled again before the thaw.

    Where the sanitizer strikes first, the router tries again: the answer is right, and the retry tells.
    """
    corrupted = fleet.retries("other").get("state_corrupted", 0)
    victims, victims_expected = requests.make(NUM_VICTIMS, num_prompt=NUM_PROMPT)
    refill, refill_expected = requests.make(NUM_REFILL, num_prompt=NUM_PROMPT, max_tokens=60)
    fleet["decode"].freeze()
    replies = [fleet.send("alone", body) for body in victims]
    fleet.leased("prefill-a", NUM_VICTIMS)
    fleet.ticketed("alone")
    fleet["prefill-a"].freeze()
    fleet["decode"].thaw()
    wait_until(lambda: fleet.stats("decode").transfers_in_flight == NUM_VICTIMS, "all are read")
    wait_until(lambda: fleet.stats("decode").transfers_in_flight == 0, "the deadline has passed")
    with fleet.fault("slow-steps"):
        replies += [fleet.send("other", body) for body in refill]
        wait_until(lambda: fleet.stats("decode").num_running >= NUM_VICTIMS, "the pool is in use again")
        fleet["prefill-a"].thaw()
        wait_until(lambda: all(one.done() for one in replies), "all are answered", ANSWER_DEADLINE_S)
    wrong = []
    for reply, tokens in zip(replies, victims_expected + refill_expected, strict=True):
        answer = reply.result()
        if answer.status != 200:
            wrong.append(answer.error)
        elif answer.token_ids != tokens:
            wrong.append("other tokens than undisturbed")
    found = fleet.retries("other").get("state_corrupted", 0) - corrupted
    return wrong + ["found by the sanitizer"] * int(found)


def test_late_bytes_land_in_quarantine(fleet, requests, table):
    started = time.monotonic()
    assert late_write(fleet, requests) == []
    fault = "prefill server frozen during the read, thawed when its readers' memory was others'"
    outcome = "exact answers all, also of those others; the sanitizer is silent"
    table.add(fault, "any", outcome, "quarantine, until the read has ended", time.monotonic() - started)


def test_without_quarantine_they_land_in_other_requests(fleet, requests):
    with fleet.fault("no-quarantine"):
        assert late_write(fleet, requests)
