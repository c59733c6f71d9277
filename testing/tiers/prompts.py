"""Random prompts that share beginnings at two depths, as system prompts and conversations do."""

from __future__ import annotations

import random

NUM_ROOTS, NUM_BRANCHES = 10, 4


def shared_prompts(count: int, seed: int, scale: int = 1) -> list[list[int]]:
    """Returns prompts of at most 112 tokens times ``scale``. Some of them repeat a phrase, which n-grams
    find."""
    choose = random.Random(seed)

    def text(least: int, most: int) -> list[int]:
        return [choose.randrange(6, 150) for _ in range(choose.randint(least * scale, most * scale))]

    roots = [text(20, 48) for _ in range(NUM_ROOTS)]
    branches = [[root + text(8, 40) for _ in range(NUM_BRANCHES)] for root in roots]
    prompts = []
    for _ in range(count):
        root = min(choose.randrange(NUM_ROOTS), choose.randrange(NUM_ROOTS))  # some are asked for more often
        beginning = choose.choice([roots[root], *branches[root]])
        phrase = text(1, 8)
        prompts.append(beginning + phrase * choose.randint(1, 2) + text(1, 8))
    return prompts
