"""The router of a release, run as its pod says, and its answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx

from testing.kubernetes.api import Manifest
from testing.kubernetes.control_plane import ApiServer
from testing.kubernetes.node import Node
from testing.kubernetes.pod_process import PodProcess

CALL_TIMEOUT_S = 10.0


class RouterPod(PodProcess):
    """Runs the router of a pod object."""

    def __init__(self, node: Node, server: ApiServer, pod: Manifest, folder: Path, admin_token: str) -> None:
        super().__init__(node, server, pod, folder)
        (container,) = pod["spec"]["containers"]
        (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "http")
        self.url = f"http://{pod['status']['podIP']}:{port}"
        self._client = httpx.Client(
            base_url=self.url, timeout=CALL_TIMEOUT_S, headers={"Authorization": f"Bearer {admin_token}"}
        )

    def is_up(self) -> bool:
        assert self.process.is_running, f"the router has ended:\n{self.process.log_tail}"
        try:
            return self._client.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> dict[str, dict[str, Any]]:
        """Returns the workers by address."""
        answer = self._client.get("/admin/v1/workers")
        assert answer.status_code == 200, answer.text
        return {worker["address"]: worker for worker in answer.json()["workers"]}

    def in_use(self) -> set[str]:
        """Returns the addresses to which new requests may go."""
        return {address for address, worker in self.workers().items() if worker["state"] == "serving"}

    def why_not_ready(self) -> str:
        """Returns why the router is not ready, as operators see it; empty if it is ready."""
        if self._client.get("/readyz").status_code == 200:
            return ""
        answer = self._client.get("/admin/v1/pools")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["problem"])

    def metric(self, name: str, **labels: str) -> float:
        """Returns a metric's value, 0 if there is no such series. Labels must be in the page's order."""
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        series = re.escape(f"{name}{{{shown}}}" if labels else name)
        found = re.search(rf"^{series} (\S+)$", self._client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def relists(self, cause: str) -> float:
        return self.metric("twinfang_discovery_relists_total", cause=cause)

    async def ask(self) -> int:
        """Requests a completion; returns its status."""
        body = {"model": "bundled_model", "prompt": [5, 6, 7], "max_tokens": 2}
        async with httpx.AsyncClient(base_url=self.url, timeout=CALL_TIMEOUT_S) as client:
            return (await client.post("/v1/completions", json=body)).status_code
