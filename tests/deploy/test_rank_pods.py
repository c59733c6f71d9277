"""Several servers in a pod, and a server in several pods, as the chart starts, probes and stops them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from testing.checkpoints.random_checkpoint import MOE_WITH_MTP, make_checkpoint
from testing.conditions import until
from testing.deploy.helm import DEPLOY, Manifest, of_kind, render
from testing.deploy.kubernetes_api import NAMESPACE, running_api
from testing.deploy.local_pods import Node, Pod
from testing.engines.speculating import Ask, make_engine, serve
from testing.fleets.clients import complete, greedy_body
from wire.messages.sampling_params import SamplingParams

NUM_TOKENS = 60
VALUES: Manifest = {
    "model": {"directory": "moe", "volume": {"hostPath": {"path": "/srv/models"}}},
    "poolDefaults": {
        "replicas": 1,
        "drainSeconds": 60,
        "flags": {"cache-memory": 0.05, "max-num-seqs": 8, "max-model-len": 512, "threads": 1},
    },
    "router": {
        "preStopSeconds": 1,
        "shutdownGraceSeconds": 30,
        "flags": {"decode-policy": "round_robin"},
    },
}

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is mounted at /models."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "moe", MOE_WITH_MTP, seed=5)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    choose = random.Random(3)
    return [[choose.randrange(6, 150) for _ in range(length)] for length in (2, 33, 64, 90, 17, 5)]


@pytest.fixture(scope="module")
def expected(models: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Of one engine that has all experts."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    asks = [Ask(tuple(prompt), params) for prompt in prompts]
    return [list(answer.tokens) for answer in serve(make_engine(models / "moe", "none", 0, None, 0), asks)]


@asynccontextmanager
async def release(pool: Manifest, models: Path, folder: Path) -> AsyncIterator[tuple[Node, list[Manifest]]]:
    values = VALUES | {"decodePools": {"default": pool}}
    manifests = render(values, DEPLOY / "examples" / "cpu-demo.yaml", namespace=NAMESPACE)
    async with running_api() as api:
        node = Node(api, folder, api.kubeconfig(folder / "kubeconfig"), {"/models": models})
        try:
            yield node, manifests
        finally:
            await node.close()


async def ask(router: Pod, prompts: list[list[int]]) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=f"http://{router.ip}:{router.port('http')}", timeout=120) as client:
        bodies = [greedy_body(prompt, NUM_TOKENS, model="moe") for prompt in prompts]
        answers = await asyncio.gather(*(complete(client, body) for body in bodies))
    return [list(answer.token_ids) for answer in answers]


async def _until_figure(address: str, start: str, value: float) -> None:
    async def is_shown() -> bool:
        return await figure(address, start) == value

    await until(is_shown, f"{start} is {value}", interval_s=0.1)


def children_of(pod: Pod) -> list[int]:
    pid = pod.process.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def figure(address: str, start: str) -> float:
    """Of the lines of a page of metrics that start so, the sum."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://{address}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(start))


async def test_ranks_of_one_pod_are_found_serve_and_drain_with_it(
    models: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    async with release({"dataParallel": 2, "expertParallel": True}, models, tmp_path) as (node, manifests):
        deployments = of_kind(manifests, "Deployment")
        pods = await asyncio.gather(
            *(node.start(deployments[name]) for name in ("prefill-default", "decode-default"))
        )
        decode = pods[1]
        router = await node.start(deployments["router"])
        connected = f"{router.ip}:{router.port('http')}", 'twinfang_servers_connected{role="decode"}'
        await _until_figure(*connected, 2)
        assert await ask(router, prompts) == expected
        for port in (18200, 18201):
            assert await figure(f"{decode.ip}:{port}", "twinfang_generation_tokens_total") > 0, (
                "each has served"
            )
        ranks = children_of(decode)
        os.kill(ranks[1], signal.SIGKILL)
        await until(lambda: not decode.is_ready)
        await until(lambda: decode.is_ready)
        assert not set(ranks) & set(children_of(decode)), "the group has started anew"
        await _until_figure(*connected, 2)
        assert await ask(router, prompts) == expected
        await node.stop(decode)
        assert decode.log.read_text().count(" is drained, after ") == 2


async def test_pods_of_one_server_are_one_server_whichever_of_them_is_deleted(
    models: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    pool = {"tensorParallel": 2, "leaderWorkerSet": {"size": 2}}
    async with release(pool, models, tmp_path) as (node, manifests):
        deployments = of_kind(manifests, "Deployment")
        _, (leader, worker) = await asyncio.gather(
            node.start(deployments["prefill-default"]),
            node.start_group(of_kind(manifests, "LeaderWorkerSet")["decode-default"]),
        )
        router = await node.start(deployments["router"])
        assert (
            await figure(f"{router.ip}:{router.port('http')}", 'twinfang_servers_connected{role="decode"}')
            == 1
        )
        assert await ask(router, prompts) == expected
        await node.stop(worker)
        assert f"{leader.ip}:8200 is drained, after " in worker.log.read_text()
        await node.gone(leader)


async def test_ranks_of_two_pods_are_one_group_and_a_server_each(
    models: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    pool = {"dataParallel": 4, "expertParallel": True, "leaderWorkerSet": {"size": 2}}
    async with release(pool, models, tmp_path) as (node, manifests):
        deployments = of_kind(manifests, "Deployment")
        _, pods = await asyncio.gather(
            node.start(deployments["prefill-default"]),
            node.start_group(of_kind(manifests, "LeaderWorkerSet")["decode-default"]),
        )
        router = await node.start(deployments["router"])
        connected = f"{router.ip}:{router.port('http')}", 'twinfang_servers_connected{role="decode"}'
        await _until_figure(*connected, 4)
        assert await ask(router, prompts) == expected
        served = [
            await figure(f"{pod.ip}:{port}", "twinfang_generation_tokens_total")
            for pod in pods
            for port in (18200, 18201)
        ]
        assert min(served) > 0, "each rank of each pod has served"
        for pod in pods:  # their hooks find each other by names, which there are none of here
            pod.process.terminate()
        for pod in pods:
            await node.gone(pod)
