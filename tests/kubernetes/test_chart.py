"""An API server takes the rendered chart, whole; and the chart of other values on top of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testing.deploy.helm import CHART, EXAMPLES
from testing.deploy.leader_worker_sets import pods_of
from testing.kubernetes.api import Manifest
from testing.kubernetes.cloud import CPU_DEMO, VALUES
from testing.kubernetes.release import OLDEST_VERSION, CommandFailedError, Release

SCALED = {
    "prefillPools": {"default": {"autoscaling": {"enabled": True}}},
    "decodePools": {"default": {"autoscaling": {"enabled": True}}},
}
SECURE: Manifest = {
    "cert-manager": {"tls": {"enabled": True, "issuerRef": {"name": "twinfang", "kind": "Issuer"}}},
    "secrets": {
        "tls": {
            "enabled": True,
            "names": "{role}.llm.example.com",
            "secrets": {role: f"our-{role}" for role in ("router", "server", "operator")},
        }
    },
}
MONITORED = {"autoscale": {"enabled": True}, "monitoring": {"serviceMonitor": {"enabled": True}}}
CUSTOM_RESOURCES = {
    *("ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "Certificate")
}
"""Of operators that are not installed here."""
UNKNOWN_TO_1_20 = {
    *("startupProbe.grpc", "readinessProbe.grpc"),  # 1.24
    "livenessProbe.terminationGracePeriodSeconds",  # 1.21
    "ports.endPort",  # 1.22
    "volumes.image",  # 1.31
    "spec.unhealthyPodEvictionPolicy",  # 1.26
}

JSON_MERGE = "application/merge-patch+json"

by_example = pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda e: e.stem if e else "defaults")


@by_example
def test_every_object_is_taken_and_kept_as_it_was_given(
    release: Release, admin: Any, example: Path | None
) -> None:
    applied = release.install(VALUES | SCALED) if example is None else release.install({}, example)
    assert_kept(release, admin, applied)


@pytest.mark.parametrize("certificates", SECURE)
def test_every_object_is_taken_with_mutual_tls_too(release: Release, admin: Any, certificates: str) -> None:
    applied = release.install(VALUES | MONITORED | SECURE[certificates], CPU_DEMO)
    assert sum("--tls-cert=" in str(one) for one in applied if one["kind"] == "Deployment") == 4
    assert_kept(release, admin, applied)


def assert_kept(release: Release, admin: Any, applied: list[Manifest]) -> None:
    for manifest in applied:
        stored = admin.get(path_of(release, manifest))
        assert missing_from(stored, manifest) == [], manifest["kind"]
    told = release.kept_back
    others = set() if admin.has_custom_resources() else {"LeaderWorkerSet"}
    assert {kind.partition(" ")[2] for kind in told.kinds} <= CUSTOM_RESOURCES | others
    if admin.version() >= OLDEST_VERSION:
        assert not told.fields
        assert not told.versions
    else:
        assert {".".join(path.rsplit(".", 2)[1:]) for path in told.fields} <= UNKNOWN_TO_1_20
    print(f"{len(applied)} objects applied; kept back: {told}")


def test_applying_it_again_changes_nothing(release: Release, admin: Any) -> None:
    def stored() -> list[Manifest]:
        applied = release.install(VALUES, CPU_DEMO)
        return [without_bookkeeping(admin.get(path_of(release, manifest))) for manifest in applied]

    assert stored() == stored()


def without_bookkeeping(manifest: Manifest) -> Manifest:
    """Old API servers count who has applied what anew, even if that is the same. Generations stay."""
    kept = {
        name: value
        for name, value in manifest["metadata"].items()
        if name not in ("managedFields", "resourceVersion")
    }
    return manifest | {"metadata": kept}


def test_an_upgrade_with_other_values_is_taken(release: Release, admin: Any) -> None:
    """What selects pods must never change, for example: the API server refuses that."""
    release.install(VALUES, CPU_DEMO)
    before = deployment(release, admin)
    changed: Manifest = {
        "image": {"tag": "2.0.0"},
        "model": {"name": "another", "directory": "m", "volume": {"hostPath": {"path": "/srv/models"}}},
        "poolDefaults": {"replicas": 5, "flags": {"max-num-seqs": 32}, "drainSeconds": 60},
        "decodePools": {"long": {"flags": {"max-model-len": 65536}}},
        "nixl": {"portRange": "21000-21999"},
        "router": {
            "replicas": 3,
            "service": {"type": "NodePort"},
            "tls": {"secretName": "router-tls", "caKey": "ca.crt"},
        },
        "auth": {
            **VALUES["auth"],
            "apiKeys": {"existingSecret": "keys"},
            "limitStore": {"existingSecret": "limits"},
        },
    }
    release.install(VALUES | changed, CPU_DEMO)
    now = deployment(release, admin)
    assert (now["spec"]["replicas"], now["metadata"]["uid"]) == (5, before["metadata"]["uid"])
    assert now["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 90
    assert deployment(release, admin, "decode-long")["spec"]["replicas"] == 5
    release.install(VALUES, CPU_DEMO)
    assert deployment(release, admin)["spec"]["template"] == before["spec"]["template"]


def test_a_pool_s_size_is_the_autoscaler_s_once_there_is_one(release: Release, admin: Any) -> None:
    """An upgrade does not take its replicas back."""
    release.install(VALUES | SCALED, CPU_DEMO)
    scale = path_of(release, {"kind": "Deployment", "metadata": {"name": f"{release.prefix}-decode-default"}})
    admin.patch(f"{scale}/scale", {"spec": {"replicas": 7}})
    release.install(VALUES | SCALED | {"image": {"tag": "2.0.0"}}, CPU_DEMO)
    assert deployment(release, admin)["spec"]["replicas"] == 7


GROUPS: Manifest = {
    "prefillPools": {"default": {"tensorParallel": 2, "leaderWorkerSet": {"size": 2}}},
    "decodePools": {"default": {"dataParallel": 4, "expertParallel": True, "leaderWorkerSet": {"size": 2}}},
}


@pytest.fixture
def has_groups(admin: Any) -> None:
    if not admin.has_custom_resources():
        pytest.skip("this kube-apiserver would not survive a custom resource: build it as README.md says")


@pytest.mark.usefixtures("has_groups")
def test_pods_of_groups_are_pods_that_it_takes(release: Release, admin: Any) -> None:
    """Their definition leaves templates open: nothing but making one of each tells."""
    made = []
    for group in release.install(VALUES | GROUPS, CPU_DEMO):
        if group["kind"] != "LeaderWorkerSet":
            continue
        for name, template, _ in pods_of(group):
            pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
            pod["metadata"] = template["metadata"] | {"name": name, "namespace": release.namespace}
            release.apply([pod])
            stored = admin.get(path_of(release, pod))
            assert stored["metadata"]["labels"] == template["metadata"]["labels"]
            made.append(stored["metadata"]["labels"].get("twinfang.io/port"))
    assert sorted(made, key=str) == ["8100", "8200-8201", "8200-8201", None]


@pytest.mark.usefixtures("has_groups")
def test_groups_are_scaled_as_deployments_are(release: Release, admin: Any) -> None:
    scaled = {"poolDefaults": {"autoscaling": {"enabled": True}}} | GROUPS
    named = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
    path = path_of(release, named | {"metadata": {"name": f"{release.prefix}-decode-default"}})
    release.install(VALUES | scaled, CPU_DEMO)
    assert admin.get(f"{path}/scale")["spec"]["replicas"] == 1, "what its definition says where nobody does"
    admin.call("PATCH", f"{path}/scale", {"spec": {"replicas": 3}}, content_type=JSON_MERGE)
    release.install(VALUES | scaled | {"image": {"tag": "2.0.0"}}, CPU_DEMO)
    spec = admin.get(path)["spec"]
    (container,) = spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert (spec["replicas"], container["image"].rpartition(":")[2]) == (3, "2.0.0")


def test_helm_itself_installs_upgrades_and_removes_it(release: Release, admin: Any) -> None:
    """Or refuses a cluster that is older than what the chart is for."""
    command = ["upgrade", "--install", release.name, str(CHART), "--namespace", release.namespace]
    command += ["--values", str(CPU_DEMO)]
    if admin.version() < OLDEST_VERSION:
        with pytest.raises(CommandFailedError, match="kubeVersion"):
            release.helm(*command)
        return
    release.helm(*command)
    release.helm(*command, "--set", "poolDefaults.replicas=3")
    assert deployment(release, admin)["spec"]["replicas"] == 3
    release.helm("rollback", release.name, "1", "--namespace", release.namespace)
    assert deployment(release, admin)["spec"]["replicas"] == 2
    release.helm("uninstall", release.name, "--namespace", release.namespace)
    assert not admin.get(f"/apis/apps/v1/namespaces/{release.namespace}/deployments")["items"]


def deployment(release: Release, admin: Any, component: str = "decode-default") -> Manifest:
    named = {"kind": "Deployment", "metadata": {"name": f"{release.prefix}-{component}"}}
    found: Manifest = admin.get(path_of(release, named | {"apiVersion": "apps/v1"}))
    return found


def path_of(release: Release, manifest: Manifest) -> str:
    version, kind = manifest.get("apiVersion", "apps/v1"), manifest["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    root = "api" if "/" not in version else "apis"
    return f"/{root}/{version}/namespaces/{release.namespace}/{plural}/{manifest['metadata']['name']}"


def missing_from(stored: Any, given: Any, path: str = "") -> list[str]:
    """Where the API server has something else than it was given; it adds defaults and rewrites quantities."""
    if isinstance(given, dict) and isinstance(stored, dict):
        return [
            found
            for name, value in given.items()
            for found in missing_from(stored.get(name), value, f"{path}.{name}")
            if name != "stringData"
        ]
    if isinstance(given, list) and isinstance(stored, list) and len(given) == len(stored):
        return [
            found
            for i, (inner, value) in enumerate(zip(stored, given, strict=True))
            for found in missing_from(inner, value, f"{path}[{i}]")
        ]
    same = stored == given or (not given and stored is None) or as_quantity(stored) == as_quantity(given)
    return [] if same else [f"{path}: {given!r} became {stored!r}"]


def as_quantity(value: Any) -> Any:
    """``0.5`` and ``500m`` are one; what is no quantity is itself."""
    text = str(value)
    try:
        return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
    except ValueError:
        return value
