"""``twinfang drain`` of several servers, as a pod with several ranks needs it before its end."""

import argparse
import asyncio
import dataclasses

import pytest

from testing.router.scripted_servers import ScriptedDecode, server_info, server_stats
from twinfang.commands import drain
from twinfang.flags.tls import TLS_FLAGS
from twinfang.flags.values import addresses
from twinfang.stack.ports import free_ports
from wire.errors import ConfigError, DeadlineError

DRAINED = dataclasses.replace(server_stats(), drain="drained")
BUSY = dataclasses.replace(server_stats(), drain="draining", num_running=3)


@pytest.fixture
async def servers():
    running = [ScriptedDecode(server_info("both"), stats=DRAINED) for _ in range(3)]
    for server in running:
        await server.start()
    yield running
    for server in running:
        await server.stop()


@pytest.fixture(autouse=True)
def routers_look_at_once(monkeypatch):
    monkeypatch.setattr(drain, "SETTLE_S", 0.0)


def given(**values):
    """Values of flags, without those of mutual TLS."""
    return argparse.Namespace(**{flag.dest: flag.default for flag in TLS_FLAGS} | values)


async def drained(*several, timeout_s=30.0):
    run = drain.prepare(given(server=[addresses(one) for one in several], timeout=timeout_s))
    await asyncio.to_thread(run)


async def test_all_that_are_named_drain(servers, capsys):
    await drained(*(server.address for server in servers))
    assert [[told.is_draining for told in server.drains] for server in servers] == [[True]] * 3
    said = capsys.readouterr().out
    assert all(f"{server.address} is drained" in said for server in servers)


async def test_what_is_left_anywhere_fails_it_and_keeps_it_from_none_of_the_others(servers, capsys):
    servers[0].stats = BUSY
    await servers[1].stop()
    with pytest.raises(drain.NotDrainedError) as failed:
        await drained(*(server.address for server in servers), timeout_s=0.3)
    said = failed.value.message
    assert said.startswith("2 of 3 servers are not drained: ")
    assert f"{servers[0].address} is not drained after 0.3 s: 3 requests run" in said
    assert f"{servers[1].address}: SetDraining failed" in said
    assert f"{servers[2].address} is drained" in capsys.readouterr().out


async def test_one_alone_fails_with_its_own_reason(servers):
    servers[0].stats = BUSY
    with pytest.raises(DeadlineError, match="is not drained after"):
        await drained(servers[0].address, timeout_s=0.3)


def test_a_range_is_all_of_its_ports():
    assert addresses("10.0.0.7:8200-8202") == tuple(f"10.0.0.7:{port}" for port in (8200, 8201, 8202))
    assert addresses("[fd00::7]:8200-8201") == ("[fd00::7]:8200", "[fd00::7]:8201")
    (port,) = free_ports(1)
    for text in (f"demo-decode-0.demo-decode:{port}", f"[::1]:{port}", f"a-1:{port}"):
        assert addresses(text) == (text,)
    for wrong in ("10.0.0.7:8202-8200", "10.0.0.7:8200-", "10.0.0.7:8200-x", "a-b", "a:1-70000"):
        with pytest.raises(ValueError, match="expected host:"):
            addresses(wrong)


def test_no_address_is_refused():
    with pytest.raises(ConfigError, match="twinfang drain HOST:PORT"):
        drain.prepare(given(server=[], timeout=1.0))
