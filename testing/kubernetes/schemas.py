"""The fields that an API server knows, for servers older than the chart expects.

The chart is for Kubernetes 1.27 and newer. An older API server gets the objects without the fields that it
does not know; tests say which these are. From a newer API server nothing is kept back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from testing.kubernetes.api import Api, Manifest

OLDER_VERSIONS = {
    ("policy/v1", "PodDisruptionBudget"): "policy/v1beta1",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "autoscaling/v2beta2",
}
"""Older versions of API groups with the same fields, as far as the chart uses them."""


@dataclass
class KeptBack:
    """What is kept back because an API server does not know it."""

    kinds: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    """Paths of fields, beginning with the kind, without indices."""
    versions: set[str] = field(default_factory=set)
    """Versions that are replaced by an older one."""


class Schemas:
    """The schemas of all kinds of an API server, from its OpenAPI document."""

    def __init__(self, api: Api) -> None:
        self._definitions: dict[str, Any] = api.get("/openapi/v2")["definitions"]
        self._by_kind = {
            (f"{kind['group']}/{kind['version']}".lstrip("/"), kind["kind"]): schema
            for schema in self._definitions.values()
            for kind in schema.get("x-kubernetes-group-version-kind", [])
        }

    @property
    def kinds(self) -> set[str]:
        """Returns all kinds as ``group/version kind``."""
        return {f"{version} {kind}" for version, kind in self._by_kind}

    def fitted(self, manifests: list[Manifest]) -> tuple[list[Manifest], KeptBack]:
        """Returns the objects without the fields that the API server does not know, and what was kept
        back."""
        kept_back, fitted = KeptBack(), []
        for manifest in manifests:
            version, kind = manifest["apiVersion"], manifest["kind"]
            if (version, kind) not in self._by_kind:
                version = OLDER_VERSIONS.get((version, kind), "")
            schema = self._by_kind.get((version, kind))
            if schema is None:
                kept_back.kinds.add(f"{manifest['apiVersion']} {kind}")
                continue
            if version != manifest["apiVersion"]:
                kept_back.versions.add(f"{manifest['apiVersion']} {kind}")
            fitted.append(self._known(manifest | {"apiVersion": version}, schema, kind, kept_back))
        return fitted, kept_back

    def _known(self, value: Any, schema: dict[str, Any], path: str, kept_back: KeptBack) -> Any:
        if "$ref" in schema:
            schema = self._definitions[schema["$ref"].removeprefix("#/definitions/")]
        if isinstance(value, list):
            return [self._known(item, schema.get("items", {}), path, kept_back) for item in value]
        if not isinstance(value, dict):
            return value
        properties, others = schema.get("properties"), schema.get("additionalProperties", {})
        known = {}
        for name, inner in value.items():
            if properties is not None and name not in properties:
                kept_back.fields.add(f"{path}.{name}")
                continue
            inner_schema = others if properties is None else properties[name]
            found = self._known(inner, inner_schema, f"{path}.{name}", kept_back)
            if not (name.endswith("Probe") and len(found) < len(inner)):  # such a probe would check nothing
                known[name] = found
        if path.endswith(".volumes") and known.keys() == {"name"}:  # a volume of an unknown kind
            known["emptyDir"] = {}
        return known
