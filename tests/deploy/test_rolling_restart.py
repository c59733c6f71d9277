"""All pools of a release are restarted under load, with the chart's own commands, probes and hooks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from testing.deploy.helm import DEPLOY, Manifest, of_kind, render
from testing.deploy.kubernetes_api import NAMESPACE, running_api
from testing.deploy.local_pods import Node
from testing.deploy.pod_load import PodLoad

VALUES: Manifest = {
    "poolDefaults": {"replicas": 2, "drainSeconds": 60},
    "router": {"replicas": 2, "preStopSeconds": 2, "shutdownGraceSeconds": 60},
}


@pytest.mark.exhaustive
@pytest.mark.timeout(540)
async def test_a_rolling_restart_of_all_pools_loses_no_request(tmp_path: Path) -> None:
    manifests = render(VALUES, DEPLOY / "examples" / "cpu-demo.yaml", namespace=NAMESPACE)
    deployments = of_kind(manifests, "Deployment")
    async with running_api() as api:
        node = Node(api, tmp_path, api.kubeconfig(tmp_path / "kubeconfig"))
        try:
            await node.start_all(deployments.values())
            load = PodLoad(node, "bundled_model", [deployments["router"]])
            right = await load.learn()
            asking = asyncio.create_task(load.run())
            for name, deployment in deployments.items():
                before = load.num_answers
                await node.roll_out(deployment, deployment)
                print(f"{name}: restarted, {load.num_answers - before} answers meanwhile")
            load.is_over = True
            await asking
        finally:
            await node.close()
    assert load.wrong(right) == []
    assert node.failed_hooks == []
    assert load.num_answers > 100
