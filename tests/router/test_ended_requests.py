"""A request that has ended leaves nothing for the garbage collector. Collections are rare, so leftovers of a
burst of requests would keep memory until the next one.
"""

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.http.client_end import ClientEnd
from router.http.connection import HttpConnection
from router.serving.dispatch import Dispatch
from router.serving.generation import Generation
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import MODEL, raw_request
from testing.router.scripted_servers import hanging, saying

OF_A_REQUEST = (HttpConnection, RequestResponseCycle, Generation, Dispatch, ClientEnd)


def kept() -> list[object]:
    return [one for one in gc.get_objects() if type(one) in OF_A_REQUEST]


@contextmanager
def no_collections() -> Iterator[None]:
    gc.disable()
    gc.freeze()  # hides what other tests have left: a look at each of their objects takes a second
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def body(**fields) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 3} | fields).encode()


@pytest.mark.parametrize("half_closed", [False, True])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"max_tokens": -1}])
async def test_an_answered_request_is_freed_without_a_collection(make_stack, fields, half_closed):
    stack = await make_stack()
    stack.decode[0].script = saying([300, 301, 302])
    with no_collections():
        before = len(kept())
        reader, writer = await raw_request(stack, body(**fields), head="Connection: close\r\n")
        if half_closed:
            writer.write_eof()
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S)
        writer.close()
        await until(lambda: len(kept()) <= before)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abandoned_request_is_freed_without_a_collection(make_stack, stream):
    stack = await make_stack()
    stack.decode[0].script = hanging
    with no_collections():
        before = len(kept())
        _, writer = await raw_request(stack, body(stream=stream))
        await until(lambda: stack.decode[0].submitted)
        writer.transport.abort()
        await until(lambda: len(kept()) <= before)
