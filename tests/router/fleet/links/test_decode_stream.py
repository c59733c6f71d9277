import asyncio

from router.fleet.links.decode_stream import DecodeStream
from router.fleet.links.kept_stream import KeptStream
from testing.conditions import until
from testing.router.scripted_router import why_not_ready
from testing.router.scripted_servers import ScriptedDecode, ScriptedPrefill, hanging, saying, server_info
from wire.errors import UnavailableError
from wire.messages.generation import RequestOutput, Submit
from wire.messages.sampling_params import SamplingParams


def unexpected(error: BaseException) -> None:
    raise AssertionError(f"a background task died: {error}")


class Received(list):
    """All that a request was told, as outputs."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self._request_id = request_id

    def take(self, output) -> None:
        self.append(output)

    def take_tokens(self, token_ids: tuple[int, ...], now_s: float) -> None:
        self.append(RequestOutput(self._request_id, token_ids))


def submit(request_id: str) -> Submit:
    """Returns a request whose id is one character, from which its handle is made."""
    return Submit(request_id, (1,), SamplingParams(max_tokens=4), None, handle=ord(request_id))


async def connected(server: ScriptedDecode, peers: list[str] = []) -> DecodeStream:  # noqa: B006
    stream = DecodeStream(server.address, probe_interval_s=0.1, prefill_addresses=lambda _: peers)
    stream.start(unexpected)
    await until(lambda: stream.info is not None)
    return stream


async def test_outputs_reach_whom_they_are_for():
    server = ScriptedDecode(server_info("decode"), script=saying([5, 6, 7]))
    await server.start()
    stream = await connected(server)
    received = {name: Received(name) for name in "abc"}
    for name, outputs in received.items():
        stream.submit(submit(name), outputs)
    await until(lambda: all(outputs and outputs[-1].finish_reason for outputs in received.values()))
    for name, outputs in received.items():
        assert {output.request_id for output in outputs} == {name}
        assert [t for output in outputs for t in output.token_ids] == [5, 6, 7]
    assert stream.num_requests == 0
    await stream.close()
    await server.stop()


async def test_a_cancelled_request_gets_nothing_more():
    server = ScriptedDecode(server_info("decode"), script=hanging)
    await server.start()
    stream = await connected(server)
    outputs = Received("a")
    stream.submit(submit("a"), outputs)
    await until(lambda: outputs)
    stream.cancel("a")
    stream.cancel("a")
    await until(lambda: server.cancelled == ["a"])
    await stream.close()
    assert len(outputs) == 1
    await server.stop()


async def test_closing_ends_what_is_in_flight_with_an_error():
    server = ScriptedDecode(server_info("decode"), script=hanging)
    await server.start()
    stream = await connected(server)
    outputs = Received("a")
    stream.submit(submit("a"), outputs)
    await stream.close()
    assert isinstance(outputs[-1], UnavailableError)
    await server.stop()


async def test_it_connects_again_to_a_server_that_comes_back_as_another_one():
    server = ScriptedDecode(server_info("decode"), script=hanging)
    await server.start()
    stream = await connected(server)
    for i in range(3):
        outputs = Received("a")
        stream.submit(submit("a"), outputs)
        await server.stop()
        await until(lambda outputs=outputs: outputs and isinstance(outputs[-1], UnavailableError))
        server.info = server_info("decode", incarnation=f"life {i}")
        await server.start()
        await until(lambda i=i: stream.info is not None and stream.info.incarnation == f"life {i}")
    await stream.close()
    await server.stop()


async def test_a_stream_that_another_process_took_than_said_who_it_is_is_opened_anew():
    """A server that restarts in between: gRPC sends a call that nobody had taken to the next process."""
    server = ScriptedDecode(server_info("decode", incarnation="first"), script=saying([5]))
    await server.start()
    opened = []
    takes = server.stream

    async def restarts(requests, context):
        opened.append(server.info.incarnation)
        server.info = server_info("decode", incarnation="second")
        async for data in takes(requests, context):
            yield data

    server.stream = restarts
    await server.stop()
    await server.start()
    stream = await connected(server)
    await until(lambda: stream.info is not None and stream.info.incarnation == "second")
    await until(lambda: opened == ["first", "second"])
    outputs = Received("a")
    stream.submit(submit("a"), outputs)
    await until(lambda: outputs and outputs[-1].token_ids == (5,))
    await stream.close()
    await server.stop()


async def test_a_server_that_answers_nonsense_is_left_and_tried_again():
    server = ScriptedDecode(server_info("decode"))
    await server.start()
    healthy = ScriptedDecode.stream

    async def nonsense(requests, context):
        async for _ in requests:
            yield b"nonsense"

    server.stream = nonsense
    await server.stop()
    await server.start()
    stream = await connected(server)
    outputs = Received("a")
    stream.submit(submit("a"), outputs)
    await until(lambda: outputs and isinstance(outputs[-1], UnavailableError))
    assert "can't be read" in stream.problem
    await server.stop()
    server.stream = healthy.__get__(server)
    server.script = saying([5])
    await server.start()
    await until(lambda: stream.info is not None)
    outputs.clear()
    stream.submit(submit("b"), outputs)
    await until(lambda: outputs and outputs[-1].token_ids == (5,))
    await stream.close()
    await server.stop()


async def test_a_server_of_the_wrong_role_is_not_used_and_said_so():
    server = ScriptedPrefill(server_info("prefill"))
    await server.start()
    stream = DecodeStream(server.address, probe_interval_s=0.1, prefill_addresses=lambda _: [])
    stream.start(unexpected)
    await until(lambda: "expected decode or both" in stream.problem)
    assert stream.info is None
    await stream.close()
    await server.stop()


async def test_prefill_servers_are_introduced_when_either_side_appears(make_stack):
    stack = await make_stack(num_prefill=2)
    addresses = {server.address for server in stack.prefill}
    await until(lambda: set(stack.decode[0].peers) == addresses)
    stack.decode[0].peers.clear()
    await stack.prefill[0].stop()
    await until(lambda: stack.services.pool.num_connected()["prefill"] == 1)
    stack.prefill[0].info = server_info("prefill", incarnation="prefill-2")
    await stack.prefill[0].start()
    await until(lambda: stack.decode[0].peers == [stack.prefill[0].address])
    await stack.decode[0].stop()
    stack.decode[0].peers.clear()
    await stack.decode[0].start()
    await until(lambda: set(stack.decode[0].peers) == addresses)


async def test_servers_of_different_models_are_not_paired(make_stack):
    stack = await make_stack(ready=False)
    await stack.prefill[0].stop()
    stack.prefill[0].info = server_info("prefill", fingerprint="another", incarnation="prefill-2")
    await stack.prefill[0].start()
    await until(lambda: "fingerprint" in why_not_ready(stack))
    assert (await stack.complete(prompt="hello world")).status_code == 503
    await asyncio.sleep(0)
    assert stack.prefill[0].requests == []


async def test_a_wish_that_comes_while_the_one_before_is_told_is_told_too():
    """Before the stream is open nobody but it tells the server anything."""
    server = ScriptedDecode(server_info("decode"), script=hanging)
    server.may_drain.clear()
    await server.start()
    stream = DecodeStream(server.address, probe_interval_s=0.1, prefill_addresses=lambda _: [])
    stream.drain.wish(True)
    stream.start(unexpected)
    await until(lambda: server.drains)
    assert stream.info is None
    stream.drain.wish(False)
    server.may_drain.set()
    await until(lambda: [one.is_draining for one in server.drains] == [True, False])
    assert not server.info.is_draining
    await stream.close()
    await server.stop()


async def test_a_stream_whose_helper_fails_ends_and_says_so(monkeypatch):
    """Without its writer a stream would look well, and requests would wait on it for ever."""

    async def write(stream: KeptStream, _call: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(KeptStream, "_write", write)
    server = ScriptedDecode(server_info("decode"), script=hanging)
    await server.start()
    stream, fatal = DecodeStream(server.address, probe_interval_s=0.1, prefill_addresses=lambda _: []), []
    stream.start(fatal.append)
    await until(lambda: fatal)
    assert fatal[0].exceptions[0].args == ("a fault of ours",)
    assert stream.info is None
    await stream.close()
    await server.stop()
