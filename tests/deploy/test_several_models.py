"""A release of two models, with the chart's own commands and labels, on real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from testing.deploy.helm import DEPLOY, Manifest, of_kind, render
from testing.deploy.kubernetes_api import NAMESPACE, running_api
from testing.deploy.local_pods import Node

PROMPT = "def fibonacci(n):"


def model(name: str) -> Manifest:
    """A model of one server that does both: its name is all that tells it from the other."""
    volume = {"hostPath": {"path": f"/srv/{name}"}}
    pools = {"prefillPools": {}, "decodePools": {name: {"replicas": 1, "flags": {"role": "both"}}}}
    return {"name": name, "directory": name, "volume": volume, **pools}


@pytest.mark.exhaustive
@pytest.mark.timeout(540)
async def test_requests_reach_the_servers_of_their_model_by_one_address(
    tmp_path: Path, bundled_model: Path
) -> None:
    names = ("first", "second")
    for name in names:
        shutil.copytree(bundled_model, tmp_path / "models" / name)
    manifests = render(
        {"models": [model(name) for name in names]},
        DEPLOY / "examples" / "cpu-demo.yaml",
        namespace=NAMESPACE,
    )
    deployments = of_kind(manifests, "Deployment")
    folder = tmp_path / "models"
    async with running_api() as api:
        volumes = {"/models/0": folder, "/models/1": folder, "/models": folder}
        node = Node(api, tmp_path, api.kubeconfig(tmp_path / "kubeconfig"), volumes)
        try:
            servers = [await node.start(deployments[f"decode-{name}"]) for name in names]
            router = await node.start(deployments["router"])
            url = f"http://{router.ip}:{router.port('http')}"
            async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
                listed = (await client.get("/v1/models")).json()["data"]
                assert [card["id"] for card in listed] == list(names)
                body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
                texts = set()
                for name, server in zip(names, servers, strict=True):
                    answer = await client.post("/v1/completions", json=body | {"model": name})
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["model"] == name
                    texts.add(answer.json()["choices"][0]["text"])
                    metrics = await client.get(f"http://{server.ip}:{server.port('metrics')}/metrics")
                    assert "twinfang_generation_tokens_total 16.0" in metrics.text
                assert len(texts) == 1, "both are the same model under two names"
                missing = await client.post("/v1/completions", json=body | {"model": "third"})
                assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
                await node.stop(servers[0])
                answer = await client.post("/v1/completions", json=body | {"model": "second"})
                assert answer.status_code == 200, "the other model is not concerned"
        finally:
            await node.close()
