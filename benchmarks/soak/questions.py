"""The fixed pool of requests. Each always has the same answer, whatever happens on its way."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from testing.oracles.recall_task import make_recall_prompt

FIRST_ID, LAST_ID = 5, 900
"""Token ids of random prompts: no special ones."""
NUM_PREFIXES = 4
PREFIX_TOKENS = 240

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "frequency_penalty": 0.3},
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
)
NUM_SESSIONS, NUM_TURNS = 12, 5
EACH = 8
"""Number of questions of each kind: every way of sampling, with drafts and without."""


@dataclass(frozen=True)
class Question:
    """One request of the pool. How it is sent, streamed or with a salt, does not change its answer."""

    name: str
    body: dict[str, Any]


def make_questions(seed: int) -> list[Question]:
    """Return the pool of ``seed``.

    | kind | prompt, tokens | answer, tokens |
    |---|---|---|
    | one | 1: nothing is handed over | 24 |
    | short | 2 to 40 | 16 to 64 |
    | long | 300 to 700 | 8 to 40 |
    | shared | one of four prefixes of 240, and 5 to 120 of its own | 16 to 64 |
    | recall | 128 to 600 of the recall task, as text | 24 |
    | talkative | 20 to 60 | 160 to 240: most faults strike in the midst of it |
    """
    rng = random.Random(f"questions {seed}")
    prefixes = [_ids(rng, PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    kinds: dict[str, list[tuple[list[int] | str, int]]] = {
        "one": [(_ids(rng, 1), 24) for _ in range(EACH)],
        "short": [(_ids(rng, rng.randint(2, 40)), rng.randint(16, 64)) for _ in range(EACH)],
        "long": [(_ids(rng, rng.randint(300, 700)), rng.randint(8, 40)) for _ in range(EACH)],
        "shared": [
            (prefixes[i % NUM_PREFIXES] + _ids(rng, rng.randint(5, 120)), rng.randint(16, 64))
            for i in range(EACH)
        ],
        "recall": [
            (make_recall_prompt(rng.randrange(10**6), rng.randint(128, 600)).prompt, 24) for _ in range(EACH)
        ],
        "talkative": [(_ids(rng, rng.randint(20, 60)), rng.randint(160, 240)) for _ in range(EACH)],
    }
    return [
        Question(f"{kind}-{i}", _body(prompt, max_tokens, i))
        for kind, asked in kinds.items()
        for i, (prompt, max_tokens) in enumerate(asked)
    ]


def make_turns(seed: int) -> list[Question]:
    """Return conversations of ``NUM_TURNS`` turns: each prompt continues the one before, and names its
    session."""
    rng = random.Random(f"turns {seed}")
    found: list[Question] = []
    for session in range(NUM_SESSIONS):
        prompt = _ids(rng, rng.randint(120, 260))
        for turn in range(NUM_TURNS):
            body = _body(list(prompt), rng.randint(4, 16), session) | {"session_id": f"session-{session}"}
            found.append(Question(f"turn-{session}-{turn}", body))
            prompt += _ids(rng, rng.randint(20, 120))
    return found


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def _body(prompt: list[int] | str, max_tokens: int, index: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": index,
        "speculate": index < EACH // 2,
        "return_token_ids": True,
        "skip_special_tokens": False,
        **SAMPLING[index % len(SAMPLING)],
    }
