"""A release is upgraded under load to other weights and to another protocol, with the chart's own commands,
probes, hooks and strategies. Pools roll out at the same time, and one of them takes longer to load."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from testing.deploy.helm import DEPLOY, Manifest, of_kind, render
from testing.deploy.kubernetes_api import NAMESPACE, running_api
from testing.deploy.local_pods import Node
from testing.deploy.pod_load import PodLoad

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

MODEL = "demo"
SLOW_S = 10.0
"""How much longer the pods of the slow role take to load."""
PROGRAMS = {"next": "testing.deploy.next_release", "later": "testing.deploy.later_release"}
OTHER_WEIGHTS: Manifest = {"model": {"directory": "b"}}
OTHER_PROTOCOL: Manifest = {"image": {"tag": "next"}, "routerImage": {"tag": "next"}}
NEXT_RELEASE: Manifest = {"image": {"tag": "later"}, "routerImage": {"tag": "later"}}


@pytest.fixture(scope="module")
def models(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with the bundled model, ``a``, and with slightly other weights, ``b``."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("a", "b"):
        shutil.copytree(bundled_model, folder / name)
    weights = load_file(folder / "b" / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.dim() == 2:
            tensor += (0.1 * tensor.float().std() * torch.randn(tensor.shape, generator=noise)).to(
                tensor.dtype
            )
    save_file(weights, folder / "b" / "model.safetensors", metadata={"format": "pt"})
    return folder


def release(num_prefill: int, num_decode: int, *changes: Manifest) -> dict[str, Manifest]:
    """Render the Deployments."""
    values: Manifest = {
        "model": {"name": MODEL, "directory": "a", "volume": {"hostPath": {"path": "/srv/models"}}},
        "poolDefaults": {"drainSeconds": 60},
        "prefillPools": {"default": {"replicas": num_prefill}},
        "decodePools": {"default": {"replicas": num_decode}},
        "router": {"replicas": 2, "preStopSeconds": 2, "shutdownGraceSeconds": 60},
    }
    for change in changes:
        for name, fields in change.items():
            values[name] = values.get(name, {}) | fields
    return of_kind(render(values, DEPLOY / "examples" / "cpu-demo.yaml", namespace=NAMESPACE), "Deployment")


@pytest.mark.parametrize(
    ("size", "changes", "slow"),
    [
        ((1, 1), [OTHER_WEIGHTS], "decode"),
        ((1, 1), [NEXT_RELEASE], "prefill"),
        ((2, 2), [NEXT_RELEASE], "decode"),
        ((1, 1), [OTHER_PROTOCOL], "prefill"),
        ((1, 1), [OTHER_PROTOCOL], "decode"),
        ((4, 6), [OTHER_WEIGHTS, OTHER_PROTOCOL], "prefill"),
    ],
    ids=[
        "1-1-weights",
        "1-1-release",
        "2-2-release",
        "1-1-protocol-slow-prefill",
        "1-1-protocol-slow-decode",
        "4-6-both",
    ],
)
async def test_an_upgrade_and_its_rollback_always_leave_servers_that_fit(
    size: tuple[int, int], changes: list[Manifest], slow: str, models: Path, tmp_path: Path
) -> None:
    old, new = release(*size), release(*size, *changes)
    async with running_api() as api:
        kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
        node = Node(api, tmp_path, kubeconfig, volumes={"/models": models}, programs=PROGRAMS)
        try:
            await node.start_all(old.values())
            load = PodLoad(node, MODEL, [old["router"], new["router"]], num_clients=2, max_tokens=60)
            right = [await load.learn()]
            asking = asyncio.create_task(load.run())
            for before, after in ((old, new), (new, old))[: 1 if size == (4, 6) else 2]:
                await upgrade(node, before, after, slow)
                print(f"{load.num_answers} answers, {len(load.failures)} failures")
                right.append(await load.learn())
            load.is_over = True
            await asking
        finally:
            await node.close()
    assert load.wrong(*right) == []
    assert load.num_answers > 50
    assert (right[0] != right[1]) == (OTHER_WEIGHTS in changes)


async def upgrade(node: Node, old: dict[str, Manifest], new: dict[str, Manifest], slow: str) -> None:
    await asyncio.gather(
        *(
            node.roll_out(old[name], new[name], load_s=SLOW_S if name.startswith(slow) else 0.0)
            for name in old
        )
    )
