"""A release of the chart in a namespace of its own: rendered by Helm, applied by kubectl, server-side."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from testing.deploy.helm import CHART, RELEASE, helm_binary, kubectl_binary
from testing.kubernetes.api import Manifest
from testing.kubernetes.control_plane import ApiServer
from testing.kubernetes.schemas import KeptBack, Schemas

OLDEST_VERSION = (1, 27)
"""The oldest Kubernetes version that the chart supports."""
RENDERED_VERSION = (1, 34)
"""The version for which the chart is rendered if the cluster is older than the oldest."""
COMMAND_TIMEOUT_S = 60.0


class CommandFailedError(Exception):
    """A command failed; the message is the program's output."""


@dataclass
class Release:
    """A release with ``files`` and ``values`` on top of the chart's own values."""

    server: ApiServer
    namespace: str
    folder: Path
    name: str = RELEASE
    kept_back: KeptBack = field(default_factory=KeptBack)
    """What was kept back from the API server at the last apply."""

    @property
    def prefix(self) -> str:
        return f"{self.name}-twinfang"

    def render(self, values: Manifest | None = None, *files: Path) -> list[Manifest]:
        """Renders the release as Helm does for this cluster."""
        version = self._version()
        major, minor = version if version >= OLDEST_VERSION else RENDERED_VERSION
        sources = [argument for file in files for argument in ("--values", str(file))]
        command = ["template", self.name, str(CHART), "--namespace", self.namespace]
        command += ["--kube-version", f"{major}.{minor}", "--skip-tests", *sources, "--values", "-"]
        text = self.helm(*command, stdin=yaml.safe_dump(values or {}))
        return [document for document in yaml.safe_load_all(text) if document]

    def apply(self, manifests: list[Manifest]) -> list[Manifest]:
        """Applies the objects, without what the API server does not know, and returns them."""
        with self.server.as_admin() as api:
            fitted, self.kept_back = Schemas(api).fitted(manifests)
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(fitted))
        return fitted

    def install(self, values: Manifest | None = None, *files: Path) -> list[Manifest]:
        return self.apply(self.render(values, *files))

    def helm(self, *arguments: str, stdin: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        return self._run([str(helm_binary()), *arguments], stdin, timeout_s)

    def kubectl(self, *arguments: str, stdin: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        command = [str(kubectl_binary()), "--namespace", self.namespace, *arguments]
        return self._run(command, stdin, timeout_s)

    def _version(self) -> tuple[int, int]:
        with self.server.as_admin() as api:
            return api.version()

    def _run(self, command: list[str], stdin: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Runs a command with its own home directory, so that it uses nobody's configuration or caches."""
        kubeconfig = self.server.kubeconfig(self.folder / "kubeconfig")
        environment = os.environ | {"HOME": str(self.folder), "KUBECONFIG": str(kubeconfig)}
        process = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=environment
        )
        if process.returncode:
            raise CommandFailedError(process.stderr)
        return process.stdout
