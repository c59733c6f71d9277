"""A router's stream to a prefill server: many prompts at once, each with its own end."""

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import msgpack
import pytest

from prefill_server.stream import RouterStreams
from testing.conditions import until
from testing.router.prefill_calls import prefill
from wire.codec import PROTOCOL_VERSION, encode
from wire.errors import DeadlineError, InvalidRequestError
from wire.gathered import Gathered, messages_in
from wire.messages.generation import Cancel, DrainNews, ErrorReply, PrefillNews, PrefillReply, PrefillRequest
from wire.messages.handoff import Ticket
from wire.rpc import (
    PREFILL_PATH,
    PREFILL_SERVICE,
    SERVER_OPTIONS,
    decode_prefill_reply,
    open_channel,
    service,
    stream_handler,
)


def request(name: str, **fields) -> PrefillRequest:
    return PrefillRequest(name, (1, 2, 3), **fields)


def reply(name: str) -> PrefillReply:
    return PrefillReply(Ticket(name, 1, 1, "a:1", "aa", 2, (1,), 1, 30.0), None, 0, 0.0, 0.0)


class Server:
    """Computes a prompt until :meth:`finish` is called for it; prompts of some names end at once."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.is_draining = False
        self._finished: dict[str, asyncio.Event] = {}
        self.streams = RouterStreams(self._serve, lambda: DrainNews(self.is_draining, "aa"))

    @property
    def running(self) -> set[str]:
        return self._finished.keys() - set(self.ended)

    def finish(self, name: str) -> None:
        self._finished[name].set()

    async def _serve(self, message: PrefillRequest):
        name = message.request_id
        if name == "refused":
            raise InvalidRequestError("no")
        if name == "broken":
            raise ZeroDivisionError
        self._finished[name] = asyncio.Event()
        try:
            await self._finished[name].wait()
            yield reply(name)
        finally:
            self.ended.append(name)


@asynccontextmanager
async def serving():
    server = Server()
    transport = grpc.aio.server(options=SERVER_OPTIONS)
    methods = {"Stream": stream_handler(server.streams.handle)}
    transport.add_generic_rpc_handlers((service(PREFILL_SERVICE, methods),))
    port = transport.add_insecure_port("127.0.0.1:0")
    await transport.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield server, channel
    await transport.stop(None)


class Router:
    """One stream, and all that came on it."""

    def __init__(self, channel) -> None:
        self.told: dict[str, object] = {}
        self.drains: list[bool] = []
        self.stream = channel.stream_stream(PREFILL_PATH)()
        self._reading = asyncio.create_task(self._read())

    async def send(self, *messages) -> None:
        together = tuple(one if isinstance(one, bytes) else encode(one) for one in messages)
        await self.stream.write(together[0] if len(together) == 1 else encode(Gathered(together)))

    async def _read(self) -> None:
        while (data := await self.stream.read()) is not grpc.aio.EOF:
            for one in messages_in(data):
                news = decode_prefill_reply(one)
                if isinstance(news, PrefillNews):
                    self.told[news.request_id] = news.news
                else:
                    self.drains.append(news.is_draining)

    async def end(self) -> None:
        self._reading.cancel()
        self.stream.cancel()


async def test_prompts_of_one_stream_end_in_any_order_and_a_fault_ends_only_its_own():
    async with serving() as (server, channel):
        router = Router(channel)
        await router.send(request("a"), request("refused"), request("broken"), request("b"))
        await until(lambda: server.running == {"a", "b"} and len(router.told) == 2)
        assert router.told["refused"] == ErrorReply(InvalidRequestError.code, "no")
        assert router.told["broken"].code == "internal_error"
        for name in ("b", "a"):
            server.finish(name)
            await until(lambda name=name: router.told.get(name) == reply(name))
        await router.end()


async def test_a_cancelled_prompt_is_given_up_and_so_are_all_when_the_router_goes():
    async with serving() as (server, channel):
        router = Router(channel)
        await router.send(*map(request, "abc"))
        await until(lambda: server.running == set("abc"))
        await router.send(Cancel("b"), Cancel("unknown"))
        await until(lambda: server.ended == ["b"])
        await router.end()
        await until(lambda: sorted(server.ended) == ["a", "b", "c"])


async def test_messages_that_can_t_be_read_and_ids_in_use_are_answered():
    async with serving() as (server, channel):
        router = Router(channel)
        cut_short = msgpack.packb([PROTOCOL_VERSION, "PrefillRequest", ["cut-short"]])
        await router.send(b"nothing", cut_short, request("a"))
        await until(lambda: server.running == {"a"} and "cut-short" in router.told)
        assert router.told["cut-short"].code == "malformed_message"
        await router.send(request("a"))
        await until(lambda: "a" in router.told)
        assert "in use" in router.told["a"].message
        assert server.running == {"a"}
        await router.end()


async def test_a_late_prompt_is_given_up():
    async with serving() as (server, channel):
        with pytest.raises(DeadlineError, match="not computed within"):
            async for _ in prefill(channel, request("late", timeout_s=0.05)):
                pass
        assert server.ended == ["late"]


async def test_every_router_hears_of_drains_and_a_stopping_server_sends_what_is_ready():
    async with serving() as (server, channel):
        routers = [Router(channel) for _ in range(2)]
        await until(lambda: all(router.drains == [False] for router in routers))
        server.is_draining = True
        server.streams.tell_of_drain()
        await until(lambda: all(router.drains == [False, True] for router in routers))
        await routers[0].send(request("a"))
        await until(lambda: server.running == {"a"})
        server.finish("a")
        await until(lambda: "a" in routers[0].told)
        server.streams.close()
        assert await asyncio.wait_for(routers[1].stream.code(), 20) is grpc.StatusCode.OK
