"""All pools of a release are restarted under load, with the chart's own commands, probes and hooks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from testing.deploy.helm import DEPLOY, Manifest, of_kind, render
from testing.deploy.kubernetes_api import NAMESPACE, running_api
from testing.deploy.local_pods import Node

NUM_CLIENTS = 8
VALUES: Manifest = {
    "poolDefaults": {"replicas": 2, "drainSeconds": 60},
    "router": {"replicas": 2, "preStopSeconds": 2, "shutdownGraceSeconds": 60},
}
PROMPTS = [f'def function_{i}(items, limit={i}):\n    """' for i in range(6)]


@dataclass
class Load:
    """Clients that ask one thing after another of whichever router a Service would choose."""

    node: Node
    router: Manifest
    answers: dict[str, str] = field(default_factory=dict)
    """What each prompt is answered with, as it was before anything was restarted."""
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    async def learn(self) -> None:
        for prompt in PROMPTS:
            self.answers[prompt] = await self._ask(prompt)

    async def run(self) -> None:
        prompts = itertools.cycle(PROMPTS)
        await asyncio.gather(*(self._keep_asking(prompts) for _ in range(NUM_CLIENTS)))

    async def _keep_asking(self, prompts: Iterator[str]) -> None:
        while not self.is_over:
            prompt = next(prompts)
            try:
                answer = await self._ask(prompt)
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            self.num_answers += 1
            if answer != self.answers[prompt]:
                self.failures.append(f"{prompt!r} was answered {answer!r}, not {self.answers[prompt]!r}")

    async def _ask(self, prompt: str) -> str:
        routers = [pod for pod in self.node.of(self.router) if pod.takes_requests]
        assert routers, "no router takes requests"
        router = routers[self.num_answers % len(routers)]
        body = {
            "model": "bundled_model",
            "prompt": prompt,
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with httpx.AsyncClient(
            timeout=60.0
        ) as client:  # a connection each: that is what a Service balances
            response = await client.post(
                f"http://{router.ip}:{router.port('http')}/v1/completions", json=body
            )
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "length"
        return str(choice["text"])


@pytest.mark.exhaustive
@pytest.mark.timeout(540)
async def test_a_rolling_restart_of_all_pools_loses_no_request(tmp_path: Path) -> None:
    manifests = render(VALUES, DEPLOY / "examples" / "cpu-demo.yaml", namespace=NAMESPACE)
    deployments = of_kind(manifests, "Deployment")
    async with running_api() as api:
        node = Node(api, tmp_path, api.kubeconfig(tmp_path / "kubeconfig"))
        try:
            replicas = [one for one in deployments.values() for _ in range(one["spec"]["replicas"])]
            await asyncio.gather(*map(node.start, replicas))
            load = Load(node, deployments["router"])
            await load.learn()
            asking = asyncio.create_task(load.run())
            for name, deployment in deployments.items():
                before = load.num_answers
                await node.restart(deployment)
                print(f"{name}: restarted, {load.num_answers - before} answers meanwhile")
            load.is_over = True
            await asking
        finally:
            await node.close()
    assert load.failures == []
    assert load.num_answers > 100
