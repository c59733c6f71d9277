"""A prefill server that is killed, frozen or restarted while its prompts are handed over."""

from __future__ import annotations

import time

import pytest

from testing.conditions import PROMPT_S, wait_until
from testing.faults.asked import EXACT, RETRIES, ROUTERS, SERVERS, Asked, ask_all, thaw_decode, until_all_read
from testing.faults.fleet import TRANSFER_DEADLINE_S


@pytest.fixture
def ask(fleet, requests):
    return lambda max_tokens=24: ask_all(fleet, requests, max_tokens)


def until_in_mid_read(fleet):
    """prefill-a is frozen; the reads from it have been posted and can't end."""
    fleet["prefill-a"].freeze()
    thaw_decode(fleet)
    until_all_read(fleet)


def test_killed_before_the_read(fleet, ask, table):
    asked = ask()
    with fleet.nobody_waits("alone"):
        fleet["prefill-a"].kill()
        thaw_decode(fleet)
        check_after_a_kill(asked, "prefill server killed before the read", table)


def test_killed_during_the_read(fleet, ask, table):
    asked = ask()
    until_in_mid_read(fleet)
    with fleet.nobody_waits("alone"):
        fleet["prefill-a"].kill()
        check_after_a_kill(asked, "prefill server killed during the read", table)


def check_after_a_kill(asked, fault, table):
    asked.exact_elsewhere(fault, RETRIES, table)
    reply = asked.reply("alone")
    assert reply.status == 503
    assert "prefill server" in reply.error
    assert reply.seconds < PROMPT_S
    table.add(fault, SERVERS["alone"], "503, no prefill server is connected", RETRIES, reply.seconds)


def test_killed_after_the_read(fleet, ask, table):
    retries = [fleet.retries(router) for router in SERVERS]
    asked = ask(max_tokens=300)
    with fleet.fault("slow-steps"):  # the answers are under way until all have begun
        thaw_decode(fleet)
        wait_until(lambda: fleet.stats("decode").num_running == 3, "decode has read")
        wait_until(lambda: fleet.stats("decode-local").num_running == 1, "decode-local has read")
        fleet["prefill-a"].kill()
    seconds = max(asked.exact(router) for router in SERVERS)
    assert [fleet.retries(router) for router in SERVERS] == retries, (
        "an answer under way needs no prefill server"
    )
    fault = "prefill server killed after the read"
    table.add(fault, "any", EXACT, "nothing: it is not needed any more", seconds)


def test_told_to_stop_before_the_read(fleet, ask, table):
    retries = [fleet.retries(router) for router in SERVERS]
    asked = ask()
    stopped = fleet.clients.submit(fleet["prefill-a"].stop)
    thaw_decode(fleet)
    seconds = max(asked.exact(router) for router in SERVERS)
    assert [fleet.retries(router) for router in SERVERS] == retries, "it stays until its leases are read"
    assert stopped.result() == 0
    fault = "prefill server told to stop (SIGTERM) before the read"
    table.add(fault, "any", EXACT, "it waits for the reads, 8 s at most", seconds)


def test_frozen_in_mid_transfer_and_thawed_late(fleet, ask, table):
    asked = ask()
    until_in_mid_read(fleet)
    fault = "prefill server frozen during the read, thawed after the deadline"
    seconds = asked.exact("two-prefill")
    assert TRANSFER_DEADLINE_S < seconds < TRANSFER_DEADLINE_S + PROMPT_S
    bound = "`--transfer-deadline`"
    table.add(fault, SERVERS["two-prefill"], f"{EXACT}, from the other server", bound, seconds)
    assert not any(fleet.stats(name).transfers_in_flight for name in ("decode", "decode-local"))
    stats = fleet.stats("decode")
    assert stats.transfer_failures["deadline"] >= 2
    assert min(stats.quarantined_blocks, stats.quarantined_slots) >= 2
    fleet["prefill-a"].thaw()
    bound = "`--transfer-deadline`, then the thaw or gRPC's keepalive"
    for router in ("local", "alone"):
        table.add(fault, SERVERS[router], f"{EXACT}, once thawed", bound, asked.exact(router))


def test_restarted_under_the_same_address(fleet, ask, table):
    with fleet.spare("prefill-a"):  # a frozen server is taken for dead after 20 to 30 s
        asked = ask()
        fleet["prefill-a"].kill()
    for router in SERVERS:
        wait_until(lambda router=router: fleet.serves(fleet[router]), f"router {router} is ready")
    thaw_decode(fleet)
    for router in SERVERS:
        seconds = asked.exact(router)
        fault = "prefill server restarted at its address before the read"
        outcome = f"{EXACT}; the ticket of its former life is refused"
        table.add(fault, SERVERS[router], outcome, f"its restart, {RETRIES}", seconds)


def test_killed_while_later_chunks_are_computed(fleet, requests, table):
    """Early blocks have been read by then; one of the two servers continues without a fault."""
    bodies, expected = requests.make(len(ROUTERS), num_prompt=700, max_tokens=12)
    parts = {name: fleet.stats(name).transfer_parts for name in ("decode", "decode-local")}
    with fleet.nobody_waits("alone"):
        with fleet.fault("small-chunks"):
            replies = [fleet.send(router, body) for router, body in zip(ROUTERS, bodies, strict=True)]
            for name, count in parts.items():
                wait_until(
                    lambda name=name, count=count: fleet.stats(name).transfer_parts >= count + 4,
                    f"{name} has read early blocks",
                )
            assert not any(reply.done() for reply in replies)
            assert fleet.stats("prefill-a").leases_held > 0
            fleet["prefill-a"].kill()
        asked = Asked(fleet, replies, expected)
        check_after_a_kill(asked, "prefill server killed while it computed what was read already", table)
    wait_until(lambda: fleet.is_idle_alone("decode"), "all blocks of decode are back")
    wait_until(lambda: fleet.is_idle_alone("decode-local"), "all blocks of decode-local are back")


def test_frozen_while_later_chunks_are_computed_and_thawed(fleet, requests, table):
    """Nothing is late while there is nothing to read; a read that was under way just then is tried again."""
    (body,), (tokens,) = requests.make(1, num_prompt=700, max_tokens=12)
    parts, retries = fleet.stats("decode").transfer_parts, fleet.retries("alone")
    with fleet.fault("small-chunks"):
        reply = fleet.send("alone", body)
        wait_until(lambda: fleet.stats("decode").transfer_parts >= parts + 2, "early blocks are read")
        fleet["prefill-a"].freeze()
        time.sleep(1.5 * TRANSFER_DEADLINE_S)
        assert not reply.done()
        fleet["prefill-a"].thaw()
    answer = reply.result()
    assert (answer.status, answer.token_ids) == (200, tokens)
    assert sum(fleet.retries("alone").values()) <= sum(retries.values()) + 1
    fault = "prefill server frozen while it computed what was read already, thawed"
    table.add(fault, SERVERS["alone"], EXACT, "the thaw, or gRPC's keepalive", answer.seconds)
