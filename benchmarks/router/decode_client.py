"""A router's end of one decode server, and nothing else: answers on one stream, read as they arrive.

    python -m benchmarks.router.decode_client PORT ROWS TOKENS

``benchmarks.steps.host_time`` starts it. It ends when the first of the answers has ended.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from wire.codec import encode
from wire.messages.generation import StepNews, Submit
from wire.messages.sampling_params import SamplingParams
from wire.rpc import STREAM_PATH, decode_stream_reply, open_channel

PROMPT_TOKENS, BLOCK_TOKENS = 64, 16


async def ask(port: int, num_rows: int, num_tokens: int) -> None:
    """Asks for ``num_rows`` answers of ``num_tokens`` tokens each.

    The prompts' lengths differ, so that the answers need their next blocks in different steps.
    """
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        stream: Any = channel.stream_stream(STREAM_PATH)()
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        for i in range(num_rows):
            tokens = tuple(5 + (7 * i + 31 * j) % 500 for j in range(PROMPT_TOKENS + i % BLOCK_TOKENS))
            name = f"request-{i:04}-of-the-client"
            await stream.write(encode(Submit(name, tokens, params, None, handle=i)))
        while True:
            news = decode_stream_reply(await stream.read())
            if isinstance(news, StepNews) and news.outputs:
                stream.cancel()
                return


if __name__ == "__main__":
    asyncio.run(ask(*map(int, sys.argv[1:])))
