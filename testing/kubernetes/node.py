"""Does the work of controllers, the scheduler and kubelets on pods, as a test says."""

from __future__ import annotations

import itertools
from typing import Any

from testing.kubernetes.api import Api, Manifest

NODE = "node-a"
_numbers = itertools.count(1)


def next_ip() -> str:
    """Returns a loopback address that no other pod has, so that all servers can listen on the chart's
    port."""
    number = next(_numbers)
    return f"127.77.{number >> 8}.{number & 255}"


class Node:
    """Manages the pods of one namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self._namespace = namespace

    def path(self, name: str = "", part: str = "") -> str:
        return "/".join(filter(None, [f"/api/v1/namespaces/{self._namespace}/pods", name, part]))

    def create(
        self,
        deployment: str,
        name: str,
        *,
        ip: str | None = None,
        labels: dict[str, str] | None = None,
        finalizers: tuple[str, ...] = (),
    ) -> Manifest:
        """Creates a pod as a Deployment would make it, on a node, running and not ready."""
        path = f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{deployment}"
        template = self.api.get(path)["spec"]["template"]
        metadata = template["metadata"] | {"name": name, "finalizers": list(finalizers)}
        metadata["labels"] = metadata["labels"] | (labels or {})
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        self.api.post(self.path(), pod)
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self.api.post(self.path(name, "binding"), binding)
        ip = ip or next_ip()
        return self.set_status(name, phase="Running", podIP=ip, podIPs=[{"ip": ip}])

    def set_ready(self, name: str, is_ready: bool) -> Manifest:
        status = "True" if is_ready else "False"
        conditions = [{"type": kind, "status": status} for kind in ("Ready", "ContainersReady")]
        return self.set_status(name, conditions=conditions)

    def set_status(self, name: str, **status: Any) -> Manifest:
        return self.api.patch(self.path(name, "status"), {"status": status})

    def set_metadata(self, name: str, **metadata: Any) -> Manifest:
        return self.api.patch(self.path(name), {"metadata": metadata})

    def delete(self, name: str) -> Manifest:
        """Starts the pod's grace period, which is as long as the chart says."""
        return self.api.delete(self.path(name))

    def end(self, name: str) -> Manifest:
        """Removes the object, because its containers have ended, unless a finalizer holds it."""
        return self.api.delete(self.path(name), {"gracePeriodSeconds": 0})

    def token_of(self, pod: Manifest) -> str:
        """Returns the token of the pod's service account, valid while the pod exists."""
        account = pod["spec"]["serviceAccountName"]
        bound_to = {key: pod["metadata"][key] for key in ("name", "uid")} | {
            "kind": "Pod",
            "apiVersion": "v1",
        }
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
        asked = {"expirationSeconds": 3600, "boundObjectRef": bound_to}
        answer = self.api.post(
            path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": asked}
        )
        token: str = answer["status"]["token"]
        return token
