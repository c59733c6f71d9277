"""Mutual TLS of gRPC servers: who is refused, what both sides say of it, and that nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import ssl

import grpc
import pytest

from testing.certificates import Authority
from testing.conditions import PROMPT_S, until
from wire import callers
from wire.channels import TlsChannels
from wire.errors import ConfigError, TwinfangError, UnavailableError
from wire.messages.generation import Empty
from wire.messages.handoff import Abandon, EndLease
from wire.repeated_lines import RepeatedLines
from wire.rpc import (
    ABANDON,
    END_LEASE,
    PREFILL_PATH,
    PREFILL_SERVICE,
    TRANSFER_SERVICE,
    call,
    open_channel,
    stream_handler,
    unary_handler,
)
from wire.server import GrpcServer
from wire.tls.identity import Identity

PAST = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
OTHER = Authority()


@pytest.fixture(scope="module")
def authority():
    return Authority()


@contextlib.asynccontextmanager
async def serving(files):
    """A server with one call for routers, one for servers, and an echo for routers."""

    async def answer(_request, _context):
        return Empty()

    async def echo(requests, _context):
        async for data in requests:
            yield data

    server = GrpcServer("127.0.0.1", 0, Identity(files, "server"))
    server.add_service(
        PREFILL_SERVICE, {ABANDON.name: unary_handler(ABANDON, answer), "Stream": stream_handler(echo)}
    )
    server.add_service(TRANSFER_SERVICE, {END_LEASE.name: unary_handler(END_LEASE, answer)})
    await server.start()
    try:
        yield server
    finally:
        server.stop()
        await server.wait_until_stopped()


async def abandon(identity, server):
    """Calls as a router does. Once, since a handshake may be late on a busy machine, and again then."""
    async with TlsChannels(identity)(f"127.0.0.1:{server.port}") as channel:
        return await call(channel, ABANDON, Abandon("a"), timeout_s=PROMPT_S)


@pytest.fixture(autouse=True)
def own_lines(monkeypatch):
    """Lines that earlier tests wrote don't silence those of this one."""
    monkeypatch.setattr(callers, "lines", RepeatedLines(callers.log))


@pytest.fixture
def files(authority, tmp_path):
    return authority.identity(tmp_path, "server"), authority.identity(tmp_path, "router")


async def test_a_router_may_prefill_and_may_not_touch_leases(files, caplog):
    async with serving(files[0]) as server:
        router = Identity(files[1], "router")
        assert await abandon(router, server) == Empty()
        with caplog.at_level(logging.WARNING, "wire.callers"):
            async with TlsChannels(router)(f"127.0.0.1:{server.port}") as channel:
                with pytest.raises(UnavailableError, match=r"twinfang.Transfer is for server, and .* router"):
                    await call(channel, END_LEASE, EndLease("a", 1, 1), timeout_s=PROMPT_S)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "wire.callers"]
    assert "is refused: twinfang.Transfer is for server" in line


async def test_a_stream_is_refused_as_clearly_as_a_call(files):
    async with serving(files[0]) as server:
        stranger = Identity(files[0], "server")
        async with TlsChannels(stranger)(f"127.0.0.1:{server.port}") as channel:
            stream = channel.stream_stream(f"/{PREFILL_SERVICE}/Stream")(iter([b"a"]))
            with pytest.raises(grpc.aio.AioRpcError, match=r"twinfang.Prefill is for router") as refused:
                await asyncio.wait_for(stream.read(), PROMPT_S)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


REFUSED = {
    "another authority": ({"of": OTHER}, "refuses this process's certificate, which is for"),
    "expired": ({"expires": PAST}, "this process's certificate has expired"),
    "an unknown server": ({"trusts": OTHER}, "the server's certificate is refused: .* in `tls_ca`"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_refused_caller_and_its_server_say_why_in_one_line(
    case, authority, files, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(callers, "HANDSHAKE_S", 0.0)
    how, says = REFUSED[case]
    how = dict(how)
    strange = how.pop("of", authority).identity(tmp_path, "router", **{"trusts": authority} | how)
    async with serving(files[0]) as server:
        with caplog.at_level(logging.WARNING, "wire.callers"):
            with pytest.raises(UnavailableError, match=says) as refused:
                await abandon(Identity(strange, "router"), server)
            assert "\n" not in refused.value.message
            await until(lambda: [one for one in caplog.messages if "TLS refused" in one])
        good = authority.identity(tmp_path, "router")
        assert await abandon(Identity(good, "router"), server) == Empty()


async def test_a_caller_without_certificate_or_without_tls_gets_no_answer(files, authority):
    async with serving(files[0]) as server:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            with pytest.raises(UnavailableError):
                await call(channel, ABANDON, Abandon("a"), timeout_s=PROMPT_S)
        credentials = grpc.ssl_channel_credentials(files[0].authorities.read_bytes())
        options = [("grpc.ssl_target_name_override", "server.twinfang")]
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{server.port}", credentials, options=options
        ) as channel:
            with pytest.raises(UnavailableError):
                await call(channel, ABANDON, Abandon("a"), timeout_s=PROMPT_S)
        assert await abandon(Identity(files[1], "router"), server) == Empty()


async def test_a_server_of_another_name_is_no_server(files, authority, tmp_path):
    """The router's certificate is of the right authority, and is not a server's."""
    with pytest.raises(ConfigError, match=r"that of a server has to have 'server.twinfang' among"):
        Identity(files[1], "server")
    impostor = grpc.aio.server()
    key, chain = files[1].private_key.read_bytes(), files[1].certificate.read_bytes()
    port = impostor.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    await impostor.start()
    async with TlsChannels(Identity(files[1], "router"))(f"127.0.0.1:{port}") as channel:
        with pytest.raises(UnavailableError, match=r"it has to be for 'server.twinfang'"):
            await call(channel, ABANDON, Abandon("a"), timeout_s=PROMPT_S)
    await impostor.stop(None)


async def test_a_new_certificate_takes_over_and_leaves_streams_alone(files, authority, tmp_path):
    identity = Identity(files[1], "router")
    async with serving(files[0]) as server, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(identity.watch())
        async with TlsChannels(identity)(f"127.0.0.1:{server.port}") as channel:
            stream = channel.stream_stream(PREFILL_PATH)()
            await stream.write(b"1")
            assert await stream.read() == b"1"
            before = identity.current
            authority.identity(tmp_path, "router")
            await until(lambda: identity.current is not before, "the new one is used")
            await stream.write(b"2")
            assert await stream.read() == b"2"
            assert await call(channel, ABANDON, Abandon("a"), timeout_s=PROMPT_S) == Empty()
        watching.cancel()


async def test_a_certificate_of_an_authority_that_is_taken_away_is_cut_off(
    files, authority, tmp_path, caplog
):
    async with serving(files[0]) as server:
        identity = Identity(files[1], "router")
        async with TlsChannels(identity)(f"127.0.0.1:{server.port}") as channel:
            stream = channel.stream_stream(PREFILL_PATH)()
            await stream.write(b"1")
            assert await stream.read() == b"1"
            before = server.identity.current
            OTHER.identity(tmp_path, "server")
            await until(lambda: server.identity.current is not before, "the authority is gone")
            async with asyncio.timeout(PROMPT_S):
                assert await stream.code() is not grpc.StatusCode.OK
            with pytest.raises(TwinfangError, match="of an authority that is no longer trusted"):
                await call(channel, ABANDON, Abandon("a"), timeout_s=PROMPT_S)
        assert any("is ended: the certificate for" in line for line in caplog.messages)
        current = OTHER.identity(tmp_path, "router")
        assert await abandon(Identity(current, "router"), server) == Empty()


async def test_sockets_speak_tls_1_3(files):
    """gRPC's version is a setting of the whole process: the end-to-end test looks at it."""
    identity = Identity(files[0], "server")
    assert identity.server_ssl().minimum_version is ssl.TLSVersion.TLSv1_3
    assert identity.client_ssl().minimum_version is ssl.TLSVersion.TLSv1_3
