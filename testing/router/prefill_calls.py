"""Prompts that a test sends to a prefill server, without a router."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from wire.codec import encode
from wire.errors import error_from_code
from wire.gathered import messages_in
from wire.messages.generation import ErrorReply, PrefillNews, PrefillReply, PrefillRequest, PrefillStarted
from wire.rpc import PREFILL_PATH, decode_prefill_reply


async def prefill(
    channel: grpc.aio.Channel, request: PrefillRequest
) -> AsyncGenerator[PrefillStarted | PrefillReply, None]:
    """Yields what the server says of one prompt, on a stream of its own. Raises the server's error. Closing
    the generator ends the stream, and with it the work on the server."""
    stream: Any = channel.stream_stream(PREFILL_PATH)()
    try:
        await stream.write(encode(request))
        while (data := await stream.read()) is not grpc.aio.EOF:
            for one in messages_in(data):
                told = decode_prefill_reply(one)
                if not isinstance(told, PrefillNews):
                    continue
                if isinstance(told.news, ErrorReply):
                    raise error_from_code(told.news.code, told.news.message)
                yield told.news
                if isinstance(told.news, PrefillReply):
                    return
    finally:
        stream.cancel()
