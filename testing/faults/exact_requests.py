"""Requests whose exact answers are known, because an undisturbed server answered them."""

from __future__ import annotations

import random
from typing import Any

from testing.faults.fleet import Fleet


class Requests:
    """Bodies of requests, and the tokens with which an undisturbed server answers them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._choose = random.Random(8)
        self._num_salts = 0

    def make(
        self, count: int, *, num_prompt: int = 300, max_tokens: int = 24
    ) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Returns ``count`` bodies and the exact answer to each. No prefix cache has any part of the
        prompts."""
        bodies = [
            {
                "prompt": [self._choose.randrange(5, 900) for _ in range(num_prompt)],
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for _ in range(count)
        ]
        undisturbed = [self._fleet.send("local", self.salted(body)) for body in bodies]
        answers = [reply.result() for reply in undisturbed]
        assert {answer.status for answer in answers} == {200}, answers
        return [self.salted(body) for body in bodies], [answer.token_ids for answer in answers]

    def salted(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the same request in a form that no prefix cache knows."""
        self._num_salts += 1
        return body | {"cache_salt": str(self._num_salts)}
