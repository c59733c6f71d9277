"""Checks LeaderWorkerSets as the API server would, and makes their pods as the controller would."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from testing.deploy.helm import Manifest

CRD = Path(__file__).with_name("leaderworkerset_crd.yaml")


def validate_group(group: Manifest, kube_version: str) -> None:
    """Raises ``jsonschema.ValidationError`` if the resource's definition does not allow the object, and
    ``kubernetes_validate.ValidationError`` if Kubernetes does not allow its pods."""
    jsonschema.validate(group, _schema())
    templates = group["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        if name in templates:
            pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "one"}}
            kubernetes_validate.validate(pods | {"template": templates[name]}, kube_version, strict=True)


def pods_of(group: Manifest) -> list[tuple[str, Manifest, dict[str, str]]]:
    """Returns each pod of the first group, leader first: its name, its template and its containers'
    variables."""
    name, templates = group["metadata"]["name"], group["spec"]["leaderWorkerTemplate"]
    worker = templates["workerTemplate"]
    pods = []
    for index in range(templates["size"]):
        template = worker if index else templates.get("leaderTemplate", worker)
        variables = {
            "LWS_LEADER_ADDRESS": f"{name}-0.{name}.{group['metadata']['namespace']}",
            "LWS_GROUP_SIZE": str(templates["size"]),
            "LWS_WORKER_INDEX": str(index),
        }
        pods.append((f"{name}-0-{index}" if index else f"{name}-0", template, variables))
    return pods


@functools.cache
def _schema() -> dict[str, Any]:
    """Returns the custom resource's schema, made strict: it refuses unknown fields."""
    definition = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    (version,) = definition["spec"]["versions"]
    schema: dict[str, Any] = _closed(version["schema"]["openAPIV3Schema"])
    return schema


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" not in schema:
        return schema
    properties = {name: _closed(one) for name, one in schema["properties"].items()}
    return schema | {"properties": properties, "additionalProperties": False}
