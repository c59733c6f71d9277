"""Prompts that share their beginnings, run by one engine."""

from __future__ import annotations

import random

from engine.request import Request
from wire.messages.sampling_params import SamplingParams

BLOCK = 16
NUM_TOKENS = 8


def prompts_with_shared_prefixes(count, seed=0):
    """Return families of prompts: a shared beginning of up to 150 tokens, and different ends."""
    choose = random.Random(seed)
    families = [[choose.randrange(6, 150) for _ in range(choose.randint(10, 150))] for _ in range(5)]
    return [
        choose.choice(families)[: choose.randint(5, 150)]
        + [choose.randrange(6, 150) for _ in range(choose.randint(1, 40))]
        for _ in range(count)
    ]


def run(engine, prompts, concurrency, cache_salt=""):
    """Run the prompts with at most ``concurrency`` at a time; return the answers in order."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    requests = [
        Request(str(i), list(prompt), params, cache_salt=cache_salt) for i, prompt in enumerate(prompts)
    ]
    waiting, active = list(reversed(requests)), 0
    while waiting or active:
        while waiting and active < concurrency:
            engine.add(waiting.pop())
            active += 1
        for output in engine.step().outputs:
            assert output.error is None, output.error
            active -= output.finish_reason is not None
    return requests


def answers(requests):
    return [request.tokens[request.num_prompt :] for request in requests]
