"""Runs the container of one of the chart's pods: the real program, as the pod says, with the pod's token.

The process has its own mount namespace, where the token of its service account lies at the same path as in a
container. Arguments, environment and secrets are the pod's.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

from testing.kubernetes.api import Manifest
from testing.kubernetes.control_plane import ApiServer
from testing.kubernetes.node import Node
from testing.kubernetes.process import Process, find_program
from testing.repository import ROOT

TOKEN_FOLDER = "/run/secrets/kubernetes.io/serviceaccount"
WITH_TOKEN = (
    f'mount -t tmpfs tmpfs /run && mkdir -p {TOKEN_FOLDER} && mount --bind "$0" {TOKEN_FOLDER} && exec "$@"'
)
"""A shell script that mounts argument 0 in its mount namespace at the path of a pod's token."""


class PodProcess:
    """The process of a pod object; not started yet."""

    def __init__(self, node: Node, server: ApiServer, pod: Manifest, folder: Path) -> None:
        self.pod = pod
        self._node = node
        self._server = server
        self._folder = folder
        (container,) = pod["spec"]["containers"]
        folder.mkdir()
        self._tokens = folder / "service-account"
        self._tokens.mkdir()
        if self.has_token:
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
        command += [sys.executable, "-m", "twinfang", *arguments]
        self.process = Process(command, folder / "process.log", environment)

    @property
    def has_token(self) -> bool:
        """Returns whether the API server has mounted a token."""
        return any(
            "serviceAccountToken" in source
            for volume in self.pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
        )

    def renew_token(self) -> None:
        """Renews the token, as kubelets do before it expires."""
        (self._tokens / "token").write_text(self._node.token_of(self.pod))
        (self._tokens / "ca.crt").write_text(self._server.authority.read_text())

    def _write_secrets(self, container: Manifest) -> dict[str, Path]:
        """Writes the secrets; returns local folders by their path in the pod."""
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


def _here(argument: str, mounts: dict[str, Path]) -> str:
    for path, folder in mounts.items():
        argument = argument.replace(f"={path}/", f"={folder}/")
    return argument
