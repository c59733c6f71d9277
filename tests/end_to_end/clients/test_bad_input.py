"""Bad requests get a clear 4xx from the real stack, and the next request is served."""

import asyncio
import json

import msgpack
import pytest

from testing.fleets.clients import greedy_body, http_client, one_at_a_time
from wire.codec import PROTOCOL_VERSION, encode
from wire.messages.generation import StepNews, Submit
from wire.messages.sampling_params import SamplingParams
from wire.rpc import STREAM_PATH, decode_stream_reply

GOOD = greedy_body([17, 23, 42], 4)

BAD_BODIES = {
    "empty prompt": ({"prompt": ""}, 400, "empty"),
    "no prompt tokens": ({"prompt": []}, 400, "empty"),
    "prompt beyond the context": ({"prompt": [5] * 5000}, 400, "4096"),
    "prompt and answer beyond the context": ({"prompt": [5] * 4000, "max_tokens": 200}, 400, "4096"),
    "max_tokens 0": ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "max_tokens negative": ({"prompt": "a", "max_tokens": -3}, 400, "-3"),
    "unknown model": ({"prompt": "a", "model": "nobody"}, 404, "nobody"),
    "token id out of the vocabulary": ({"prompt": [5, 1024]}, 400, "1024"),
    "negative token id": ({"prompt": [-1]}, 400, "-1"),
    "stop token out of the vocabulary": ({"prompt": "a", "stop_token_ids": [99999]}, 400, "99999"),
    "biased token out of the vocabulary": ({"prompt": "a", "logit_bias": {"99999": 1}}, 400, "99999"),
    "wrong type": ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    "malformed JSON": (b'{"prompt": "a",', 400, "JSON"),
    "not an object": (b"[1, 2]", 400, "object"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400, "UTF-8"),
    "a body of 50 MB": (b'{"prompt": "' + b"a" * 50_000_000 + b'"}', 413, "bytes"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_input_is_a_clear_4xx_and_the_next_request_is_served(stacks, name):
    body, status, part = BAD_BODIES[name]
    stack = stacks("up", "--max-num-seqs", "16")
    async with http_client(stack) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert part in error["message"]
    (good,) = await one_at_a_time(stack, [GOOD])
    assert len(good.token_ids) == 4
    stack.wait_until(stack.is_idle, "nothing is left behind")


async def test_a_request_that_a_decode_server_can_t_read_is_answered_and_the_next_one_served(stacks):
    stack = stacks("up", "--max-num-seqs", "16")
    cut_short = msgpack.packb([PROTOCOL_VERSION, "Submit", ["cut-short"]])
    good = encode(Submit("good", (17,), SamplingParams(max_tokens=1, temperature=0.0), None))
    outputs = {}
    async with stack.channel("decode-0") as channel, asyncio.timeout(30):
        stream = channel.stream_stream(STREAM_PATH)()
        for data in (cut_short, b"no message at all", good):
            await stream.write(data)
        while set(outputs) != {"cut-short", "good"}:
            reply = decode_stream_reply(await stream.read())
            if isinstance(reply, StepNews):
                outputs |= {output.request_id: output for output in reply.outputs}
        stream.cancel()
    assert outputs["cut-short"].error.code == "malformed_message"
    assert (outputs["good"].finish_reason, len(outputs["good"].token_ids)) == ("length", 1)
