"""Which addresses may be added as workers, and what happens to a worker's connection when it is removed."""

import asyncio
import socket
from contextlib import asynccontextmanager

import psutil
import pytest

from router.fleet import server_pool
from router.fleet.links import link_local
from testing.conditions import TIMEOUT_S, until
from testing.router.admin_calls import get, post
from testing.router.scripted_servers import ScriptedDecode, ScriptedPrefill, saying, server_info
from twinfang.stack.ports import free_ports


@asynccontextmanager
async def running(server):
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("make", "role", "asked"),
    [
        (ScriptedPrefill, "prefill", "decode"),
        (ScriptedPrefill, "prefill", "both"),
        (ScriptedDecode, "decode", "prefill"),
    ],
    ids=str,
)
async def test_a_server_of_another_role_is_refused_by_name(make_admin_stack, make, role, asked):
    stack = await make_admin_stack()
    async with running(make(server_info(role, incarnation="new"))) as server:
        error = (await post(stack, "/workers", 400, address=server.address, role=asked))["error"]
        assert error["param"] == "address"
        assert server.address in error["message"]
        assert f"role '{role}'" in error["message"]
        assert len((await get(stack, "/workers"))["workers"]) == 2
        await post(stack, "/workers", 201, address=server.address, role=role)


@pytest.mark.parametrize("asked", ["prefill", "decode", "both"])
async def test_a_server_that_does_both_may_be_added_as_any(make_admin_stack, asked):
    stack = await make_admin_stack()
    async with running(ScriptedDecode(server_info("both", incarnation="new"))) as server:
        await post(stack, "/workers", 201, address=server.address, role=asked)


async def test_one_that_is_not_up_yet_is_accepted_and_looked_at_once_it_appears(make_admin_stack):
    stack = await make_admin_stack()
    (port,) = free_ports(1)
    added = await post(stack, "/workers", 201, address=f"127.0.0.1:{port}", role="decode")
    async with running(ScriptedPrefill(server_info("prefill", incarnation="new"), port=port)):

        async def shown():
            return {one["id"]: one for one in (await get(stack, "/workers"))["workers"]}[added["id"]]

        async with asyncio.timeout(TIMEOUT_S):
            while "role 'prefill'" not in (await shown())["problem"]:
                await asyncio.sleep(0.02)
        assert (await shown())["state"] == "unreachable"


# --- where others' secrets are ---------------------------------------------------------------------

LINK_LOCAL = (
    "169.254.169.254:80", "169.254.0.1:8100", "[fe80::1]:80", "[fd00:ec2::254]:80", "metadata.test:80",
    "2852039166:80", "0xa9fea9fe:80",
    # IPv4 inside of IPv6: mapped, compatible, translated, NAT64, NAT64 of one's own, 6to4, Teredo.
    "[::ffff:169.254.169.254]:80", "[::169.254.169.254]:80", "[::ffff:0:169.254.169.254]:80",
    "[64:ff9b::a9fe:a9fe]:80", "[64:ff9b:1::a9fe:a9fe]:80", "[2002:a9fe:a9fe::]:80", "[2001::5601:5601]:80",
    "[::ffff:100.100.100.200]:80",
)  # fmt: skip


@pytest.fixture
def names(monkeypatch):
    """What names resolve to."""
    known = {"metadata.test": "169.254.169.254"}

    async def resolve(host):
        if host in known:
            host = known[host]
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [info[4][0] for info in found]

    monkeypatch.setattr(link_local, "resolved", resolve)
    return known


async def test_addresses_of_a_clouds_metadata_are_refused(make_admin_stack, names):
    stack = await make_admin_stack()
    for address in LINK_LOCAL:
        error = (await post(stack, "/workers", 400, address=address, role="decode"))["error"]
        assert error["param"] == "address"
        assert "--allow-link-local-workers" in error["message"]
    assert len((await get(stack, "/workers"))["workers"]) == 2


async def test_ipv4_inside_of_ipv6_may_lead_elsewhere():
    for address in (
        "[64:ff9b::a00:5]:8100",
        "[2002:a00:5::]:8100",
        "[2001:db8::a9fe:a9fe]:8100",
        "[::1]:8100",
    ):
        await link_local.require_reachable(address)


async def test_an_address_is_none_of_grpcs_own_kinds(make_admin_stack):
    stack = await make_admin_stack()
    for address in ("ipv4:169.254.169.254:80", "%31%36%39.254.169.254:80", "unix:a:80", "dns:a:80"):
        error = (await post(stack, "/workers", 400, address=address, role="decode"))["error"]
        assert "host:port" in error["message"]


async def test_an_operator_may_allow_them(make_admin_stack, monkeypatch):
    monkeypatch.setattr(server_pool, "EXAMINE_TIMEOUT_S", 0.05)
    stack = await make_admin_stack(allow_link_local_workers=True)
    await post(stack, "/workers", 201, address="169.254.0.1:8100", role="decode")


async def test_a_name_that_leads_there_later_is_not_connected_to(make_admin_stack, names):
    stack = await make_admin_stack()
    (port,) = free_ports(1)
    names["later.test"] = "127.0.0.1"
    added = await post(stack, "/workers", 201, address=f"later.test:{port}", role="decode")
    names["later.test"] = "169.254.169.254"

    async def problem():
        return {one["id"]: one for one in (await get(stack, "/workers"))["workers"]}[added["id"]]["problem"]

    async with asyncio.timeout(TIMEOUT_S):
        while "169.254.169.254" not in await problem():
            await asyncio.sleep(0.02)


# --- removal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_connection_of_a_worker_that_is_removed_is_closed_at_once(
    make_admin_stack, monkeypatch, role
):
    monkeypatch.setattr(server_pool, "LEAVE_GRACE_S", 100 * TIMEOUT_S)
    monkeypatch.setattr(server_pool, "EXAMINE_TIMEOUT_S", 0.05)
    stack = await make_admin_stack()
    opened = closed = 0

    async def accept(reader, writer):
        nonlocal opened, closed
        opened += 1
        while await reader.read(1 << 16):
            pass
        closed += 1
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        added = await post(stack, "/workers", 201, address=f"127.0.0.1:{port}", role=role)
        await until(lambda: opened - closed == 1 and opened >= 2)
        assert (await stack.client.delete(f"/admin/v1/workers/{added['id']}")).status_code == 200
        await until(lambda: opened == closed)
        await until(lambda: not stack.services.pool.is_letting_go)


async def test_a_stream_without_requests_is_closed_at_once(make_admin_stack, monkeypatch):
    monkeypatch.setattr(server_pool, "LEAVE_GRACE_S", 100 * TIMEOUT_S)
    stack = await make_admin_stack()
    for worker in (await get(stack, "/workers"))["workers"]:
        assert (await stack.client.delete(f"/admin/v1/workers/{worker['id']}")).status_code == 200
    await until(lambda: not stack.services.pool.is_letting_go)
    await until(lambda: stack.decode[0].num_streams == 0)


async def test_no_connection_to_a_worker_that_was_used_and_removed_is_left(make_admin_stack, monkeypatch):
    """gRPC keeps one for as long as any call that it carried is referred to."""
    monkeypatch.setattr(server_pool, "LEAVE_GRACE_S", 0.01)
    stack = await make_admin_stack()
    stack.decode[0].script = saying([300])
    assert (await stack.complete(prompt=[1, 2, 3])).status_code == 200
    workers = (await get(stack, "/workers"))["workers"]
    ports = {int(worker["address"].rpartition(":")[2]) for worker in workers}

    def connected():
        connections = psutil.Process().net_connections("tcp")
        return {one.raddr.port for one in connections if one.raddr and one.status == "ESTABLISHED"} & ports

    assert connected() == ports
    for worker in workers:
        assert (await stack.client.delete(f"/admin/v1/workers/{worker['id']}")).status_code == 200
    await until(lambda: not stack.services.pool.is_letting_go)
    await until(lambda: not connected())
