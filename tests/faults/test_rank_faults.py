"""A data-parallel rank that is killed or frozen under load: its group starts anew, answers stay exact.

Two decode servers of two ranks each share the experts of a model; a router balances over all four.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from testing.checkpoints.random_checkpoint import MOE_WITH_MTP, make_checkpoint
from testing.engines.speculating import Ask, make_engine, serve
from testing.fleets.clients import Answer, complete, greedy_body, http_client, stream
from testing.fleets.stack import running_stack
from wire.messages.sampling_params import SamplingParams

NUM_TOKENS = 400
DEADLINE_S = 90.0
START_DEADLINE_S = 240.0
FLAGS = (
    *("--decode", "2", "--data-parallel-size", "2", "--enable-expert-parallel"),
    *("--speculative", "3", "--drafter", "mtp", "--cache-mode", "align"),
    *(
        "--decode-policy",
        "round_robin",
        "--max-num-seqs",
        "8",
        "--max-model-len",
        "512",
        "--cache-memory",
        "0.05",
        "--threads",
        "1",
    ),
)
RANKS = ("decode-0-0", "decode-0-1")
"""Of the group that is disturbed."""
ALL_RANKS = (*RANKS, "decode-1-0", "decode-1-1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE_WITH_MTP, seed=5)


@pytest.fixture(scope="module")
def bodies():
    choose = random.Random(3)
    prompts = [[choose.randrange(6, 150) for _ in range(length)] for length in (1, 2, 33, 64, 90, 40, 17, 5)]
    return [greedy_body(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def expected(model, bodies):
    """Tokens of one engine that has all experts."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    asks = [Ask(tuple(body["prompt"]), params) for body in bodies]
    return [answer.tokens for answer in serve(make_engine(model, "none", 0, None, 0), asks)]


@pytest.fixture(scope="module")
def stack(model):
    with running_stack("up", "--model", str(model), *FLAGS, deadline_s=START_DEADLINE_S) as stack:
        yield stack
        assert stack.stop() == 0


async def answered_around(stack, bodies, disturb) -> tuple[list[Answer], float]:
    """Answers to requests that are under way on both ranks when ``disturb()`` is called, and the seconds that
    the last one took from then on."""
    async with http_client(stack) as client:
        first = stream(client, bodies[0])
        await anext(first)
        others = [asyncio.create_task(complete(client, body)) for body in bodies[1:]]
        await asyncio.to_thread(stack.wait_until, lambda: all_run(stack), "both ranks have requests")
        await asyncio.to_thread(disturb)
        began = time.monotonic()
        async with asyncio.timeout(DEADLINE_S):
            answers = [answer async for answer in first][-1:]
            answers += await asyncio.gather(*others)
    return answers, time.monotonic() - began


def all_run(stack) -> bool:
    stats = stack.stats(*RANKS)
    return all(one.num_running > 0 for one in stats.values())


def assert_group_restarts(stack, before) -> None:
    """Asserts that both ranks were started again, and no other process. Then waits until all are idle."""
    stack.wait_until(stack.is_ready, "the group is ready again", START_DEADLINE_S)
    after = stack.processes()
    for name, process in before.items():
        assert (after[name].pid != process.pid) == (name in RANKS), name
    stack.wait_until(stack.is_idle, "nothing is left")


def test_ranks_share_the_load_and_answer_exactly(stack, bodies, expected):
    async def ask() -> list[Answer]:
        async with http_client(stack) as client:
            return await asyncio.gather(*(complete(client, body) for body in bodies))

    assert [answer.token_ids for answer in asyncio.run(ask())] == expected
    assert all(stats.decode_tokens > 0 for stats in stack.stats(*ALL_RANKS).values())
    stack.wait_until(stack.is_idle, "nothing is left")


@pytest.mark.exhaustive
def test_a_killed_rank_s_group_starts_anew_and_answers_go_on_elsewhere(stack, bodies, expected):
    before = stack.processes()
    killed = asyncio.run(answered_around(stack, bodies, lambda: stack.kill("decode-0-1")))
    assert [answer.token_ids for answer in killed[0]] == expected
    assert "data-parallel rank 1 has ended; no rank of its group computes without it" in stack.log
    assert_group_restarts(stack, before)


@pytest.mark.exhaustive
def test_a_frozen_rank_s_group_starts_anew_and_answers_go_on_elsewhere(stack, bodies, expected):
    before = stack.processes()
    frozen = asyncio.run(answered_around(stack, bodies, lambda: stack.kill("decode-0-0", signal.SIGSTOP)))
    assert [answer.token_ids for answer in frozen[0]] == expected
    assert "data-parallel rank 0 has said nothing for" in stack.log
    assert_group_restarts(stack, before)


@pytest.mark.exhaustive
def test_a_rank_that_is_told_to_stop_takes_its_group_along_in_good_order(stack, bodies, expected):
    before = stack.processes()
    stopped = asyncio.run(answered_around(stack, bodies, lambda: stack.kill("decode-0-1", signal.SIGTERM)))
    assert [answer.token_ids for answer in stopped[0]] == expected
    assert "data-parallel rank 1 stops, and so does this one" in stack.log
    assert_group_restarts(stack, before)
