"""Links between healthy servers that lose packets, are slow, cut or refuse connections."""

from __future__ import annotations

import pytest

from testing.conditions import PROMPT_S, wait_until
from testing.faults.asked import EXACT, ROUTERS, SERVERS, Asked, ask_all, thaw_decode, until_all_read

ATTEMPTS = "3 attempts of `--transfer-deadline`"
DECODE = ("decode", "decode-local")
READERS = "decode servers"
CRAWL = 400_000
"""Bits a second. A prompt's state, 0.4 MB, takes 8 s."""


@pytest.fixture
def fleet(fleet_in_network):
    with fleet_in_network.nobody_waits("alone"):
        yield fleet_in_network


@pytest.fixture
def until_exact(fleet, requests):
    """Returns once a new request is answered, exactly."""

    def wait(router):
        (body,), (tokens,) = requests.make(1)
        replies = []

        def is_answered():
            replies.append(fleet.send(router, requests.salted(body)).result())
            return replies[-1].status == 200

        wait_until(is_answered, f"{router} answers again")
        assert replies[-1].token_ids == tokens

    return wait


@pytest.fixture
def asked(fleet, network, requests) -> Asked:
    """Returns while reads from prefill-a are under way, which will not end soon."""
    asked = ask_all(fleet, requests)
    network.throttle("prefill-a", CRAWL)
    thaw_decode(fleet)
    until_all_read(fleet)
    return asked


@pytest.fixture
def failed_by(fleet):
    """How many reads of ``decode`` have failed by these causes. Clients don't see the causes."""
    began = fleet.stats("decode").transfer_failures

    def count(*causes):
        now = fleet.stats("decode").transfer_failures
        return sum(now[cause] - began[cause] for cause in causes)

    return count


@pytest.mark.exhaustive
def test_lost_packets(fleet, network, requests, table):
    bodies, expected = requests.make(8)
    for prefill in ("prefill-a", "prefill-b"):
        for decode in DECODE:
            network.lose(prefill, decode, one_packet_in=30)
    for server in fleet.servers:
        network.lose("front", server, one_packet_in=30)
    replies = [fleet.send(router, body) for router, body in zip(2 * ROUTERS, bodies, strict=True)]
    for reply, tokens in zip((one.result() for one in replies), expected, strict=True):
        assert (reply.status, reply.token_ids) == (200, tokens)
    seconds = max(one.result().seconds for one in replies)
    table.add("every link loses one packet in 30", "any", EXACT, "TCP sends it again", seconds)


@pytest.mark.exhaustive
def test_a_slow_link(fleet, network, requests, table):
    (body,), (tokens,) = requests.make(1)
    retries = fleet.retries("alone")
    network.throttle("prefill-a", 10_000_000)
    reply = fleet.send("alone", body).result()
    assert (reply.status, reply.token_ids) == (200, tokens)
    assert fleet.retries("alone") == retries
    fault = "prefill server sends 10 Mbit/s"
    table.add(fault, "any", f"{EXACT}, no retry", "`--transfer-deadline`", reply.seconds)


@pytest.mark.exhaustive
def test_a_link_too_slow_for_the_deadline(failed_by, asked, table):
    fault = "prefill server sends 0.4 Mbit/s, too slow for the deadline"
    asked.exact_elsewhere(fault, "`--transfer-deadline`", table)
    reply = asked.reply("alone")
    assert (reply.status, reply.token_ids) == (502, [])
    assert "state did not reach a decode server from its prefill server" in reply.error
    assert failed_by("deadline") >= 3
    table.add(fault, SERVERS["alone"], "502, it did not deliver in time", ATTEMPTS, reply.seconds)


@pytest.mark.exhaustive
def test_a_link_cut_during_the_read_and_soon_healed(fleet, network, asked, table):
    for decode in DECODE:
        network.cut("prefill-a", decode)
    wait_until(lambda: any(one.done() for one in asked.replies), "what prefill-b lent is answered")
    network.heal()
    seconds = max(map(asked.exact, SERVERS))
    fault = "link cut during the read, healed before the deadline"
    table.add(fault, "any", EXACT, "`--transfer-deadline`", seconds)


@pytest.mark.exhaustive
def test_a_link_cut_during_the_read_for_good(fleet, network, failed_by, asked, until_exact, table):
    for decode in DECODE:
        network.cut("prefill-a", decode)
    fault = "link cut during the read"
    asked.exact_elsewhere(fault, "`--transfer-deadline`", table)
    reply = asked.reply("alone")
    assert reply.status in (502, 503)
    assert failed_by("deadline", "peer_gone") >= 3
    assert reply.seconds < 2 * PROMPT_S
    outcome = "502 or 503: the prefill server did not deliver or is out of reach"
    bound = "3 attempts: `--transfer-deadline`, or gRPC's 10 s for a handshake"
    table.add(fault, SERVERS["alone"], outcome, bound, reply.seconds)
    wait_until(fleet.is_idle, "what was read into is free, though the link is still cut")
    network.heal()
    until_exact("alone")


@pytest.mark.exhaustive
def test_a_link_that_refuses(fleet, network, failed_by, asked, until_exact, table):
    for decode in DECODE:
        network.refuse("prefill-a", decode)
    fault = "link refuses from the midst of the read on"
    asked.exact_elsewhere(fault, "3 attempts", table)
    reply = asked.reply("alone")
    assert (reply.status, reply.token_ids) == (503, [])
    assert failed_by("peer_gone") > 0
    assert reply.seconds < PROMPT_S
    table.add(fault, SERVERS["alone"], "503, the prefill server is out of reach", "3 attempts", reply.seconds)
    wait_until(fleet.is_idle, "all is free, though the link still refuses")
    network.heal()
    until_exact("alone")


@pytest.mark.exhaustive
def test_a_router_that_is_cut_off(fleet, network, requests, table):
    """From one prefill server before it asks, and from one decode server while that answers."""
    bodies, expected = requests.make(3)
    long_bodies, long_expected = requests.make(2, max_tokens=400)
    long = [fleet.send("two-decode", body) for body in long_bodies]
    for decode in DECODE:
        wait_until(lambda decode=decode: fleet.stats(decode).num_running == 1, f"{decode} answers")
    network.cut("front", "decode-local")
    network.cut("front", "prefill-a")
    asked = [
        fleet.send(router, body)
        for router, body in zip(("two-prefill", "two-prefill", "alone"), bodies, strict=True)
    ]
    for fault, servers, future, tokens in (
        ("router cut off from a decode server that answers", "two decode servers", long, long_expected),
        ("router cut off from a prefill server", SERVERS["two-prefill"], asked[:2], expected[:2]),
    ):
        replies = [one.result() for one in future]
        assert [(one.status, one.token_ids) for one in replies] == [(200, one) for one in tokens], fault
        seconds = max(one.seconds for one in replies)
        table.add(fault, servers, f"{EXACT}, from the other server", "gRPC's keepalive, 30 s", seconds)
    reply = asked[2].result()
    assert reply.status == 503
    assert "no prefill server is ready" in reply.error
    outcome = "503, no prefill server is connected"
    table.add(fault, SERVERS["alone"], outcome, "gRPC's keepalive, 30 s", reply.seconds)
    wait_until(fleet.is_idle, "all is free, though the links are still cut", 2 * PROMPT_S)
