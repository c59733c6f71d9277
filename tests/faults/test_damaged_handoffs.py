"""Bits that are wrong in a handshake or in a handed-over state: no process dies, and no token is wrong."""

from __future__ import annotations

import pytest

from testing.faults.asked import EXACT, RETRIES, SERVERS

DAMAGED_STATE = "a bit of the state changes after its ticket was written"
DAMAGED_HANDSHAKE = "a prefill server's handshake has a wrong bit in NIXL's metadata"


def failures(fleet, server: str, cause: str) -> int:
    return fleet.stats(server).transfer_failures[cause]


def test_a_damaged_state_is_found_and_its_prompt_prefilled_again(fleet, requests, table):
    (body,), (tokens,) = requests.make(1)
    found = failures(fleet, "decode", "digest")
    with fleet.fault("damaged-state"):
        reply = fleet.send("alone", body).result()
    assert (reply.status, reply.error, reply.token_ids) == (200, "", tokens)
    assert failures(fleet, "decode", "digest") == found + 1
    table.add(DAMAGED_STATE, "any", f"{EXACT}, prefilled again", RETRIES, reply.seconds)


@pytest.mark.exhaustive
def test_a_server_with_a_damaged_handshake_is_avoided_and_nothing_dies(fleet, requests, table):
    bodies, expected = requests.make(3)
    handles = {name: fleet[name].handle for name in ("decode", "decode-local", "prefill-b")}
    logged = {name: len(fleet[name].log) for name in ("decode", "decode-local")}
    with fleet.fault("damaged-handshake"):
        with fleet.spare("prefill-a"):
            fleet["prefill-a"].kill()
        routers = ("two-prefill", "two-prefill", "local")
        sent = [fleet.send(router, body) for router, body in zip(routers, bodies, strict=True)]
        replies = [one.result() for one in sent]
    assert [(one.status, one.error, one.token_ids) for one in replies] == [
        (200, "", tokens) for tokens in expected
    ]
    assert {name: handle.poll() for name, handle in handles.items()} == dict.fromkeys(handles)
    for name, start in logged.items():
        lines = [line for line in fleet[name].log[start:].splitlines() if "in quarantine for 30 s, " in line]
        assert len(lines) == 1, lines
    ways = {"two-prefill": "from the other server", "local": "prefilled where it is decoded"}
    for router, reply in zip(routers[1:], replies[1:], strict=True):
        table.add(
            DAMAGED_HANDSHAKE,
            SERVERS[router],
            f"{EXACT}, {ways[router]}",
            "30 s of quarantine",
            reply.seconds,
        )
    fleet["prefill-a"].kill()  # its next life is not in quarantine
