"""The scale of a Deployment: the number of pods that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.kubernetes.cluster import Deadlines, open_cluster
from router.kubernetes.cluster_error import ClusterError


@dataclass(frozen=True)
class Scale:
    replicas: int
    resource_version: str
    """A change with this version is refused if somebody else has changed the scale since."""


class ScaleTarget:
    """Reads and patches only the scale subresource. All methods raise :class:`ClusterError`."""

    def __init__(self, namespace: str, deployment: str, kubeconfig: Path | None) -> None:
        self._namespace = namespace
        self._deployment = deployment
        self._kubeconfig = kubeconfig

    async def read(self) -> Scale:
        async with open_cluster(self._kubeconfig, Deadlines()) as cluster:
            told = await cluster.read_scale(self._namespace, self._deployment)
        return _scale(told)

    async def change(self, seen: Scale, replicas: int) -> Scale:
        """Changes the scale. The API server refuses with 409 if the scale has changed since it was
        ``seen``."""
        body = {"metadata": {"resourceVersion": seen.resource_version}, "spec": {"replicas": replicas}}
        async with open_cluster(self._kubeconfig, Deadlines()) as cluster:
            return _scale(await cluster.patch_scale(self._namespace, self._deployment, body))


def _scale(told: Mapping[str, Any]) -> Scale:
    try:
        replicas = told["spec"].get("replicas", 0)  # left out where it is 0
        return Scale(int(replicas), str(told["metadata"]["resourceVersion"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ClusterError("garbage", "the API server's answer is no scale") from error
