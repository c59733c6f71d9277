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
"""That the chart is for."""
RENDERED_VERSION = (1, 34)
"""For a cluster that is older than that."""
COMMAND_TIMEOUT_S = 60.0


class CommandFailedError(Exception):
    """With what the program has said."""


@dataclass
class Release:
    """``files`` and ``values`` on top of the chart's own values."""

    server: ApiServer
    namespace: str
    folder: Path
    name: str = RELEASE
    kept_back: KeptBack = field(default_factory=KeptBack)
    """From the API server, of what was applied last."""

    @property
    def prefix(self) -> str:
        return f"{self.name}-twinfang"

    def render(self, values: Manifest | None = None, *files: Path) -> list[Manifest]:
        """As Helm does for this cluster."""
        version = self._version()
        major, minor = version if version >= OLDEST_VERSION else RENDERED_VERSION
        sources = [argument for file in files for argument in ("--values", str(file))]
        command = ["template", self.name, str(CHART), "--namespace", self.namespace]
        command += ["--kube-version", f"{major}.{minor}", *sources, "--values", "-"]
        text = self.helm(*command, stdin=yaml.safe_dump(values or {}))
        return [document for document in yaml.safe_load_all(text) if document]

    def apply(self, manifests: list[Manifest]) -> list[Manifest]:
        """What the API server knows of them; returns that."""
        with self.server.as_admin() as api:
            fitted, self.kept_back = Schemas(api).fitted(manifests)
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(fitted))
        return fitted

    def install(self, values: Manifest | None = None, *files: Path) -> list[Manifest]:
        return self.apply(self.render(values, *files))

    def helm(self, *arguments: str, stdin: str = "") -> str:
        return self._run([str(helm_binary()), *arguments], stdin)

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return self._run([str(kubectl_binary()), "--namespace", self.namespace, *arguments], stdin)

    def _version(self) -> tuple[int, int]:
        with self.server.as_admin() as api:
            return api.version()

    def _run(self, command: list[str], stdin: str) -> str:
        """With a home of its own: nobody's configuration is read, and nobody's caches are."""
        kubeconfig = self.server.kubeconfig(self.folder / "kubeconfig")
        environment = os.environ | {"HOME": str(self.folder), "KUBECONFIG": str(kubeconfig)}
        process = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=environment
        )
        if process.returncode:
            raise CommandFailedError(process.stderr)
        return process.stdout
