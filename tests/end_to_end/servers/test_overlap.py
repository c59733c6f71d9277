"""Long prompts are read while they are computed: the answers are the same, and most bytes arrive early."""

from __future__ import annotations

import asyncio
import random

import pytest

from testing.fleets.clients import all_at_once, complete, greedy_body, http_client, one_at_a_time
from testing.fleets.stack import run_async
from testing.router.prefill_calls import prefill
from wire.errors import LeaseError
from wire.messages.generation import Empty, PrefillReply, PrefillRequest, PrefillStarted
from wire.messages.handoff import Abandon, Follow, Progress, Ticket
from wire.rpc import ABANDON, FOLLOW, call, call_for_replies

CHUNK, NUM_CHUNKS, BLOCK = 16, 40, 16
NUM_TOKENS = CHUNK * NUM_CHUNKS
FLAGS = ("--max-num-seqs", "16", "--block-size", str(BLOCK), "--max-model-len", "4096")


def prompts(seed, count, num_tokens=NUM_TOKENS):
    choose = random.Random(seed)
    return [[choose.randrange(5, 900) for _ in range(num_tokens)] for _ in range(count)]


@pytest.fixture(scope="module")
def plain(module_stacks):
    """The same model with both roles and no handoff."""
    return module_stacks("serve", *FLAGS, "--cache-mode", "none")


@pytest.fixture(scope="module")
def overlapped(module_stacks):
    """Its prefill server computes 16 tokens a step. Its servers have met: nothing is early before that."""
    stack = module_stacks.slowed("up", *FLAGS, "--max-batch-tokens", str(CHUNK))
    run_async(lambda: all_at_once(stack, [greedy_body(prompt, 1) for prompt in prompts(0, 1, 5)]))
    return stack


class Figures:
    """Counts of what a stack's servers did inside the block."""

    def __init__(self, stack):
        self._stack = stack

    def _now(self):
        decode, prefill = (self._stack.stats()[name] for name in ("decode-0", "prefill-0"))
        return decode.transfer_bytes, decode.early_bytes, prefill.prefill_tokens

    def __enter__(self):
        self._before = self._now()
        return self

    def __exit__(self, *_error):
        differences = (now - then for now, then in zip(self._now(), self._before, strict=True))
        self.bytes_read, self.early_bytes, self.computed = differences


async def exact(stack, plain, bodies):
    answers = [answer.token_ids for answer in await all_at_once(stack, bodies)]
    return answers == [answer.token_ids for answer in await one_at_a_time(plain, bodies)]


async def test_most_of_a_long_prompt_is_there_before_it_is_computed(plain, overlapped):
    num_tokens = 4 * NUM_TOKENS
    with Figures(overlapped) as figures:
        bodies = [greedy_body(prompt, 12) for prompt in prompts(1, 1, num_tokens)]
        assert await exact(overlapped, plain, bodies)
    assert figures.computed == num_tokens - 1
    assert 0 < figures.early_bytes < figures.bytes_read, "h(N-1) is never early"


async def test_many_long_and_short_prompts_at_once(plain, overlapped):
    lengths = [2, 300, 640, 17, 500, 900, 33, 640]
    bodies = [greedy_body(prompts(i, 1, length)[0], 12) for i, length in enumerate(lengths)]
    assert await exact(overlapped, plain, bodies)
    overlapped.wait_until(overlapped.is_idle, "nothing is left behind")


async def test_a_prompt_of_one_chunk_is_read_when_it_is_computed(plain, overlapped):
    with Figures(overlapped) as figures:
        assert await exact(overlapped, plain, [greedy_body(prompts(50, 1, CHUNK)[0], 4)])
    assert (figures.early_bytes, figures.bytes_read > 0) == (0, True)


async def test_blocks_that_either_side_has_cached_are_not_moved_again(plain, overlapped):
    (prompt,) = prompts(102, 1, 300)
    longer = prompt + prompts(103, 1)[0]
    with Figures(overlapped) as first:
        assert await exact(overlapped, plain, [greedy_body(prompt, 4)])
    with Figures(overlapped) as second, overlapped.fault("small-chunks"):  # time to read in between
        assert await exact(overlapped, plain, [greedy_body(longer, 4)])
    # The prefill server goes on from its cached state; the decode server has that prompt's blocks.
    assert first.computed == 299
    assert NUM_TOKENS <= second.computed < NUM_TOKENS + 8 * BLOCK
    with Figures(overlapped) as again:
        assert await exact(overlapped, plain, [greedy_body(prompt, 4)])
    # Each reads one state, and of blocks: 19; those of 59 behind the 18 that were full; the last alone.
    assert (second.bytes_read - again.bytes_read) * 18 == (first.bytes_read - again.bytes_read) * 40
    assert second.early_bytes > 0


@pytest.mark.exhaustive
async def test_a_conversation_s_next_turn_starts_from_its_kept_state_and_overlaps(plain, module_stacks):
    overlapped = module_stacks("up", *FLAGS, "--max-batch-tokens", str(CHUNK), "--conversation-return")
    (prompt,) = prompts(104, 1, 200)
    async with http_client(overlapped) as client:
        first = await complete(client, greedy_body(prompt, 20))
    new = prompts(5, 1, 700)[0]
    with Figures(overlapped) as figures:
        assert await exact(overlapped, plain, [greedy_body(prompt + first.token_ids + new, 8)])
    assert figures.computed == 700, "the state covers all but the answer's last token"
    assert figures.early_bytes > 0


async def test_a_client_that_goes_away_while_its_prompt_is_computed_leaves_nothing(overlapped):
    parts = overlapped.stats("decode-0")["decode-0"].transfer_parts
    async with http_client(overlapped) as client:
        requests = [
            asyncio.ensure_future(complete(client, greedy_body(prompt, 4))) for prompt in prompts(6, 4, 1000)
        ]
        async with asyncio.timeout(60):
            while overlapped.stats("decode-0")["decode-0"].transfer_parts == parts:
                await asyncio.sleep(0.005)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    overlapped.wait_until(overlapped.is_idle, "nothing is left behind")


# --- the prefill server alone -----------------------------------------------------------------------


def on_prefill_server(stack, converse):
    """Runs ``converse(channel)`` with a channel to the stack's prefill server."""

    async def run():
        async with stack.channel("prefill-0") as channel:
            return await asyncio.wait_for(converse(channel), 60)

    return run_async(run)


def ask_prefill(channel, name, prompt):
    request = PrefillRequest(name, tuple(prompt), cache_salt=name)
    return prefill(channel, request)


def follow(channel, early):
    message = Follow(early.incarnation, early.lease_id, early.epoch)
    return call_for_replies(channel, FOLLOW, message, timeout_s=60)


async def until_ticket(news):
    async for one in news:
        assert not isinstance(one, Ticket)


# 250 steps: to follow it, or to give it up, takes one call, however busy the machine is.
LONG = 250 * CHUNK


@pytest.mark.in_clear  # one caller in two roles
def test_who_follows_hears_of_each_full_block_once_and_gets_the_reply_s_ticket(overlapped):
    (prompt,) = prompts(7, 1, LONG)

    async def converse(channel):
        replies = ask_prefill(channel, "followed", prompt)
        early = (await anext(replies)).ticket
        *progress, ticket = [news async for news in follow(channel, early)]
        reply = await anext(replies)
        await call(channel, ABANDON, Abandon("followed"), timeout_s=10)
        return early, progress, ticket, reply

    early, progress, ticket, reply = on_prefill_server(overlapped, converse)
    assert isinstance(reply, PrefillReply)
    assert reply.ticket == ticket
    assert (ticket.lease_id, ticket.epoch, ticket.num_tokens) == (early.lease_id, early.epoch, LONG - 1)
    told = [block_id for news in progress for block_id in news.block_ids]
    assert len(progress) > 1
    assert all(isinstance(news, Progress) for news in progress)
    assert told == list(ticket.block_ids[: len(told)])
    overlapped.wait_until(overlapped.is_idle, "an abandoned prompt leaves nothing")


@pytest.mark.in_clear  # one caller in two roles
@pytest.mark.parametrize("how", ["call cancelled", "abandoned"])
def test_a_prompt_that_is_given_up_in_mid_prefill_ends_its_early_lease(overlapped, how):
    (prompt,) = prompts(8, 1, LONG)
    name = how.replace(" ", "-")

    async def converse(channel):
        replies = ask_prefill(channel, name, prompt)
        started = await anext(replies)
        news = follow(channel, started.ticket)
        first = await anext(news)
        if how == "abandoned":
            assert await call(channel, ABANDON, Abandon(name), timeout_s=10) == Empty()
        else:
            await replies.aclose()
        with pytest.raises(LeaseError):
            await until_ticket(news)
        await replies.aclose()
        return started, first

    started, first = on_prefill_server(overlapped, converse)
    assert isinstance(started, PrefillStarted)
    assert isinstance(first, Progress)
    overlapped.wait_until(overlapped.is_idle, "nothing is left behind")
    assert overlapped.stats("prefill-0")["prefill-0"].leases_ended["ended"] > 0
