"""The router of a release: the real one, run as its pod says, with its pod's token.

Its process has a mount namespace of its own, in which the token of its service account lies where it does in
a container; arguments, environment and secrets are the pod's.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.kubernetes.api import Manifest
from tests.kubernetes.control_plane import ApiServer
from tests.kubernetes.node import Node
from tests.kubernetes.process import Process, find_program

ROOT = Path(__file__).parents[2]
CALL_TIMEOUT_S = 10.0
TOKEN_FOLDER = "/run/secrets/kubernetes.io/serviceaccount"
WITH_TOKEN = (
    f'mount -t tmpfs tmpfs /run && mkdir -p {TOKEN_FOLDER} && mount --bind "$0" {TOKEN_FOLDER} && exec "$@"'
)
"""A shell's script: in the mount namespace, its argument 0 lies where a pod's token does."""


class RouterPod:
    """Runs the router of a pod object."""

    def __init__(self, node: Node, server: ApiServer, pod: Manifest, folder: Path, admin_token: str) -> None:
        self.pod = pod
        self._node = node
        self._server = server
        self._folder = folder
        (container,) = pod["spec"]["containers"]
        (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "http")
        self.url = f"http://{pod['status']['podIP']}:{port}"
        self._client = httpx.Client(
            base_url=self.url, timeout=CALL_TIMEOUT_S, headers={"Authorization": f"Bearer {admin_token}"}
        )
        folder.mkdir()
        self._tokens = folder / "service-account"
        self._tokens.mkdir()
        self.renew_token()
        mounts = self._write_secrets(container)
        arguments = [_here(argument, mounts) for argument in container["args"]]
        arguments.append(f"--host={pod['status']['podIP']}")  # pods share this machine's network
        unshare = [find_program("unshare"), "--mount"]
        if os.geteuid() != 0:
            unshare += ["--user", "--map-root-user"]
        command = [*unshare, "sh", "-c", WITH_TOKEN, str(self._tokens)]
        environment = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
        environment |= {"KUBERNETES_SERVICE_HOST": server.host, "KUBERNETES_SERVICE_PORT": str(server.port)}
        environment |= {"PYTHONPATH": str(ROOT)}
        self.process = Process(
            [*command, sys.executable, "-m", "twinfang", *arguments], folder / "router.log", environment
        )

    def renew_token(self) -> None:
        """As kubelets do before it expires."""
        (self._tokens / "token").write_text(self._node.token_of(self.pod))
        (self._tokens / "ca.crt").write_text(self._server.authority.read_text())

    def _write_secrets(self, container: Manifest) -> dict[str, Path]:
        """Folders of this machine by the path that the pod has them at."""
        secrets = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in self.pod["spec"]["volumes"]
            if "secret" in volume
        }
        found = {}
        for mount in container["volumeMounts"]:
            if mount["name"] in secrets:
                folder = found[mount["mountPath"]] = self._folder / mount["name"]
                folder.mkdir()
                namespace = self.pod["metadata"]["namespace"]
                path = f"/api/v1/namespaces/{namespace}/secrets/{secrets[mount['name']]}"
                for name, value in self._node.api.get(path)["data"].items():
                    (folder / name).write_bytes(base64.b64decode(value))
        return found

    # --- what it says ------------------------------------------------------------------------------

    def is_up(self) -> bool:
        assert self.process.is_running, f"the router has ended:\n{self.process.log_tail}"
        try:
            return self._client.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> dict[str, dict[str, Any]]:
        """By address."""
        answer = self._client.get("/admin/v1/workers")
        assert answer.status_code == 200, answer.text
        return {worker["address"]: worker for worker in answer.json()["workers"]}

    def in_use(self) -> set[str]:
        """Addresses that new requests may go to."""
        return {address for address, worker in self.workers().items() if worker["state"] == "serving"}

    def why_not_ready(self) -> str:
        """Empty if it is."""
        answer = self._client.get("/readyz")
        return "" if answer.status_code == 200 else str(answer.json()["error"]["message"])

    def metric(self, name: str, **labels: str) -> float:
        """Labels in the order that they are shown in; 0 if there is no such series."""
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        series = re.escape(f"{name}{{{shown}}}" if labels else name)
        found = re.search(rf"^{series} (\S+)$", self._client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def relists(self, cause: str) -> float:
        return self.metric("twinfang_discovery_relists_total", cause=cause)

    async def ask(self) -> int:
        """The status of a completion."""
        body = {"model": "bundled_model", "prompt": [5, 6, 7], "max_tokens": 2}
        async with httpx.AsyncClient(base_url=self.url, timeout=CALL_TIMEOUT_S) as client:
            return (await client.post("/v1/completions", json=body)).status_code


def _here(argument: str, mounts: dict[str, Path]) -> str:
    for path, folder in mounts.items():
        argument = argument.replace(f"={path}/", f"={folder}/")
    return argument
