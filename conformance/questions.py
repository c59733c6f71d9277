"""The requests of the cases: greedy completions of random prompts, other ones in each run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ID, LAST_ID = 6, 155
"""Token ids of prompts: no special ones, and in the vocabulary of every model of the suite."""


@dataclass(frozen=True)
class Question:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int
    drafts: bool = True
    """Whether drafts may be used, where the system lets a request choose."""

    @property
    def key(self) -> str:
        return f"{self.max_tokens}:{','.join(map(str, self.prompt))}"

    def body(self, model: str) -> dict[str, object]:
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }


def random_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(FIRST_ID, LAST_ID) for _ in range(count))


def random_questions(rng: random.Random, lengths: Sequence[int], max_tokens: int) -> list[Question]:
    return [Question(random_ids(rng, length), max_tokens) for length in lengths]


def lengths(rng: random.Random, count: int, least: int = 150, most: int = 240) -> list[int]:
    return [rng.randint(least, most) for _ in range(count)]


def shared_prefixes(rng: random.Random) -> list[Question]:
    """Returns prompts that share prefixes, and in which a phrase comes back, so that n-gram drafts are tried.

    Two thirds may use drafts. Every third prompt comes twice.
    """
    prefixes = [random_ids(rng, 192) for _ in range(3)]
    made = []
    for number in range(12):
        phrase = random_ids(rng, 9)
        prompt = prefixes[number % 3] + phrase * 3 + random_ids(rng, 3) + phrase[:4]
        made.append(Question(prompt, 24, drafts=number % 3 != 2))
    return made + made[::3]
