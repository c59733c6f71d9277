"""Clients that ask the routers of a release all the time, as its Service would let them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from testing.deploy.helm import Manifest
from testing.deploy.local_pods import Node

PROMPTS = [f'def function_{i}(items, limit={i}):\n    """' for i in range(6)]
ANSWER_DEADLINE_S = 120.0
RETRY_PAUSE_S = 0.2


@dataclass
class PodLoad:
    """Clients that ask one thing after another of whichever router the Service would choose."""

    node: Node
    model: str
    routers: list[Manifest]
    """The Deployments whose pods the Service selects."""
    num_clients: int = 8
    max_tokens: int = 200
    answers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """How often each prompt got each answer."""
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    @property
    def num_answers(self) -> int:
        return sum(texts.total() for texts in self.answers.values())

    async def learn(self) -> dict[str, str]:
        """Return what each prompt is answered with now."""
        return {prompt: await self._ask(prompt) for prompt in PROMPTS}

    async def run(self) -> None:
        """Ask until the load is over."""
        prompts = itertools.cycle(PROMPTS)
        await asyncio.gather(*(self._keep_asking(prompts) for _ in range(self.num_clients)))

    def wrong(self, *right: dict[str, str]) -> list[str]:
        """Return what is wrong with the answers: those that differ from all of ``right``, and failures."""
        return self.failures + [
            f"{prompt!r} was answered {text!r}"
            for prompt, texts in self.answers.items()
            for text in texts
            if text not in {one[prompt] for one in right}
        ]

    async def _keep_asking(self, prompts: Iterator[str]) -> None:
        while not self.is_over:
            prompt = next(prompts)
            try:
                self.answers[prompt][await self._ask(prompt)] += 1
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(RETRY_PAUSE_S)  # lets probes run, if no router was ready

    async def _ask(self, prompt: str) -> str:
        routers = [pod for router in self.routers for pod in self.node.of(router) if pod.takes_requests]
        assert routers, "no router takes requests"
        router = routers[self.num_answers % len(routers)]
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        url = f"http://{router.ip}:{router.port('http')}/v1/completions"
        # A connection for each request: that is what a Service balances.
        async with httpx.AsyncClient(timeout=ANSWER_DEADLINE_S) as client:
            response = await client.post(url, json=body)
        assert response.status_code == 200, f"{response.status_code} of {router.name}: {response.text}"
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "length"
        return str(choice["text"])
