"""A release of the chart that Helm installs in a cluster, changes and takes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from testing.cluster.cluster import is_ready
from testing.conditions import wait_until
from testing.kubernetes.api import Api, Manifest
from testing.kubernetes.release import OLDEST_VERSION, Release
from testing.kubernetes.schemas import Schemas

GRPC_PROBES_SINCE = (1, 24)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
ROLLOUT_DEADLINE_S = 900.0
HELM_DEADLINE_S = 300.0
POLL_INTERVAL_S = 0.5


class HelmRelease:
    """A release, kept by Helm.

    Helm refuses a cluster that is older than the chart supports. So Helm gets what the chart renders, without
    what the API server does not know, as a chart of its own.
    """

    def __init__(self, release: Release, api: Api) -> None:
        self.release = release
        self._api = api
        self.kept_back: set[str] = set()
        """What the cluster has not been given, since the beginning."""

    def upgrade(self, values: Manifest, *files: Path) -> None:
        """Installs the release, or changes it. Returns before the pods are there."""
        chart = self._written_chart(self.release.render(values, *files))
        self._helm("upgrade", "--install", self.release.name, str(chart), "--create-namespace")

    def rollback(self) -> None:
        """Goes back to the release before."""
        self._helm("rollback", self.release.name)

    def wait_until_rolled_out(self) -> None:
        """Waits until each Deployment has its pods, all ready and none of a version before."""
        wait_until(
            self.is_rolled_out,
            "the release is rolled out",
            ROLLOUT_DEADLINE_S,
            interval_s=POLL_INTERVAL_S,
        )

    def is_rolled_out(self) -> bool:
        return all(is_complete(one) for one in self.deployments()) and not self.leaving()

    def deployments(self) -> list[Manifest]:
        return self._of(f"/apis/apps/v1/namespaces/{self.release.namespace}/deployments")

    def pods(self, component: str = "") -> list[Manifest]:
        """Returns the pods, or those of ``prefill``, ``decode``, ``router`` or ``autoscale``."""
        found = self._of(f"/api/v1/namespaces/{self.release.namespace}/pods")
        label = "app.kubernetes.io/component"
        return [pod for pod in found if component in ("", pod["metadata"]["labels"].get(label))]

    def ready(self, component: str) -> list[Manifest]:
        return [
            pod
            for pod in self.pods(component)
            if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
        ]

    def leaving(self) -> list[Manifest]:
        return [pod for pod in self.pods() if "deletionTimestamp" in pod["metadata"]]

    def states(self) -> str:
        return ", ".join(
            f"{pod['metadata']['name']} {pod['status'].get('phase')}{' ready' if is_ready(pod) else ''}"
            for pod in self.pods()
        )

    def service_url(self) -> str:
        spec = self._service()["spec"]
        (port,) = spec["ports"]
        return f"{port['appProtocol']}://{spec['clusterIP']}:{port['port']}"

    def service_address(self) -> str:
        return str(self._service()["spec"]["clusterIP"])

    def put_secret(self, name: str, files: dict[str, Path]) -> None:
        """Makes a secret of files, or replaces what it holds."""
        data = {key: path.read_text() for key, path in files.items()}
        metadata = {"name": name, "namespace": self.release.namespace}
        self.release.apply([{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}])

    def _service(self) -> Manifest:
        path = f"/api/v1/namespaces/{self.release.namespace}/services/{self.release.prefix}-router"
        return self._api.get(path)

    def _helm(self, *arguments: str) -> None:
        self.release.helm(*arguments, "--namespace", self.release.namespace, timeout_s=HELM_DEADLINE_S)

    def _of(self, path: str) -> list[Manifest]:
        found: list[Manifest] = self._api.get(path)["items"]
        return found

    def _written_chart(self, manifests: list[Manifest]) -> Path:
        version = self._api.version()
        if version < GRPC_PROBES_SINCE:
            manifests = [with_http_probes(manifest) for manifest in manifests]
        fitted, kept_back = Schemas(self._api).fitted(manifests)
        self.kept_back |= kept_back.kinds | kept_back.fields | kept_back.versions
        assert version < OLDEST_VERSION or not self.kept_back, self.kept_back
        chart = self.release.folder / "chart"
        (chart / "templates").mkdir(parents=True, exist_ok=True)
        about = {"apiVersion": "v2", "name": "twinfang", "version": "0.1.0"}
        (chart / "Chart.yaml").write_text(yaml.safe_dump(about))
        text = yaml.safe_dump_all(fitted)
        assert "{{" not in text, "Helm would read it as a template"
        (chart / "templates" / "all.yaml").write_text(text)
        return chart


def with_http_probes(value: Any) -> Any:
    """Returns a manifest with HTTP probes in place of gRPC probes, which kubelets before 1.24 do not have.
    They ask for the same state, as the compose file does."""
    if isinstance(value, list):
        return [with_http_probes(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {name: with_http_probes(inner) for name, inner in value.items()}
    for probe in PROBES:
        if "grpc" in found.get(probe, {}):
            found[probe] = {name: inner for name, inner in found[probe].items() if name != "grpc"}
            found[probe]["httpGet"] = {"path": "/readyz", "port": "metrics"}
    return found


def is_complete(deployment: Manifest) -> bool:
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    counts = (status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas"))
    return seen and all(count == wanted for count in counts)
