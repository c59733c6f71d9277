"""More requests than a decode server has room for: waiting costs time, and never a lease.

They come straight to the servers, all at once. A router lets most of such a burst wait in its own queue.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from testing.faults.fleet import ANSWER_DEADLINE_S, LEASE_TTL_S, Fleet
from testing.router.prefill_calls import prefill
from wire.codec import encode
from wire.errors import LeaseError, TransferError
from wire.messages.generation import PrefillReply, PrefillRequest, StepNews, Submit
from wire.messages.sampling_params import SamplingParams
from wire.rpc import STREAM_PATH, decode_stream_reply, open_channel

NUM_REQUESTS = 64
MAX_TOKENS = 10
LOST = {LeaseError.code, TransferError.code}


@dataclass(frozen=True)
class Burst:
    """The results of a burst of requests."""

    failed: list[str]
    """Codes of errors."""
    num_wrong: int
    num_expired: int
    """Number of leases that expired."""
    num_thrown_away: int
    """Reads that came after the release."""
    seconds: float


def burst(fleet: Fleet, requests, count: int) -> Burst:
    bodies, expected = requests.make(count, num_prompt=60, max_tokens=MAX_TOKENS)

    def counts() -> tuple[int, int]:
        stats = [fleet.stats(name) for name in fleet.servers]
        return (
            sum(one.leases_ended.get("expired", 0) for one in stats),
            sum(one.transfer_failures.get("lease_ended", 0) for one in stats),
        )

    before, began = counts(), time.monotonic()
    with fleet.fault("slow-steps"):
        answers = asyncio.run(_answers(fleet, bodies))
    expired, thrown_away = (now - then for now, then in zip(counts(), before, strict=True))
    return Burst(
        failed=[answer for answer in answers if isinstance(answer, str)],
        num_wrong=sum(
            isinstance(answer, list) and answer != tokens
            for answer, tokens in zip(answers, expected, strict=True)
        ),
        num_expired=expired,
        num_thrown_away=thrown_away,
        seconds=time.monotonic() - began,
    )


async def _answers(fleet: Fleet, bodies: list[dict[str, Any]]) -> list[list[int] | str]:
    """Returns the tokens of each request, or the code of its error."""
    addresses = [fleet[name].address for name in ("prefill-a", "prefill-b")]
    tokens: dict[str, list[int]] = {f"burst-{i}": [] for i in range(len(bodies))}
    ended: dict[str, str | None] = {}
    names: dict[int, str] = {}
    """The requests by their handles."""
    async with (
        open_channel(addresses[0]) as one,
        open_channel(addresses[1]) as other,
        open_channel(fleet["decode"].address) as decode,
        asyncio.timeout(ANSWER_DEADLINE_S),
    ):
        stream = decode.stream_stream(STREAM_PATH)()
        submits = [_prefilled((one, other)[i % 2], f"burst-{i}", body) for i, body in enumerate(bodies)]
        for submit in asyncio.as_completed(submits):
            submit = await submit
            names[len(names) + 1] = submit.request_id
            await stream.write(encode(replace(submit, handle=len(names))))
        while len(ended) < len(bodies):
            reply = decode_stream_reply(await stream.read())
            if not isinstance(reply, StepNews):
                continue
            for handle, token_ids in reply.plain():
                tokens[names[handle]] += token_ids
            for output in reply.outputs:
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    ended[output.request_id] = None if output.error is None else output.error.code
        stream.cancel()
    return [ended[name] or tokens[name] for name in tokens]


async def _prefilled(channel, name: str, body: dict[str, Any]) -> Submit:
    prompt = tuple(body["prompt"])
    request = PrefillRequest(name, prompt, cache_salt=body["cache_salt"])
    params = SamplingParams(max_tokens=body["max_tokens"], temperature=0.0, ignore_eos=True)
    async for reply in prefill(channel, request):
        if isinstance(reply, PrefillReply):
            return Submit(name, prompt, params, reply.ticket, cache_salt=body["cache_salt"])
    raise AssertionError(f"{name}: no reply")


def test_64_requests_at_a_decode_server_with_room_for_four(fleet, requests, table):
    result = burst(fleet, requests, NUM_REQUESTS)
    assert result == Burst([], 0, 0, 0, result.seconds)
    assert result.seconds > 1.5 * LEASE_TTL_S, "nobody waited for long: the test shows nothing"
    fault = f"{NUM_REQUESTS} requests at a decode server with room for 4, leases of {LEASE_TTL_S:g} s"
    table.add(
        fault,
        "two prefill servers",
        "64 exact answers, none fails",
        "the queue; leases are renewed",
        result.seconds,
    )


def test_without_renewal_the_burst_loses_its_leases(fleet, requests):
    """Shows that the test above would notice if leases of waiting requests expired."""
    with fleet.fault("no-renewal"):
        result = burst(fleet, requests, NUM_REQUESTS)
    assert result.num_wrong == 0, "a late read can be slow; it can't be wrong"
    assert result.num_expired > 0
    assert set(result.failed) <= LOST
    assert result.failed, "leases were lost, and none of their requests failed"
