"""The chart renders, for every example, what Kubernetes takes and what fits together."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from testing.deploy.helm import (
    CHART,
    EXAMPLES,
    KUBERNETES_VERSIONS,
    NAMESPACE,
    Manifest,
    container_of,
    of_kind,
    pod_makers,
    pod_of,
    render,
    run_helm,
)

CUSTOM_RESOURCES = {
    "ServiceMonitor",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "HTTPRoute",
    "LeaderWorkerSet",
}

by_example = pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda e: e.stem if e else "defaults")


@functools.cache
def manifests_of(example: Path | None, kube_version: str = "1.34") -> list[Manifest]:
    return render({}, *([example] if example else []), kube_version=kube_version)


@functools.cache
def has_image_volume(example: Path | None) -> bool:
    values = {} if example is None else yaml.safe_load(example.read_text(encoding="utf-8"))
    return "image" in values.get("model", {}).get("volume", {})


@by_example
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(one, marks=[pytest.mark.exhaustive] if one in ("1.29", "1.34") else [])
        for one in KUBERNETES_VERSIONS
    ],
)
def test_every_object_is_valid_in_that_version_of_kubernetes(example: Path | None, version: str) -> None:
    if has_image_volume(example) and version < "1.31":
        pytest.skip("image volumes begin with 1.31; the chart refuses them before")
    for manifest in manifests_of(example, version):
        if manifest["kind"] not in CUSTOM_RESOURCES:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_knows_a_misspelt_field() -> None:
    deployment = of_kind(render(), "Deployment")["router"]
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(deployment, "1.34", strict=True)


@by_example
def test_helm_lints_it_without_a_warning(example: Path | None) -> None:
    sources = [] if example is None else ["--values", str(example)]
    report = run_helm("lint", "--strict", str(CHART), *sources)
    assert "[WARNING]" not in report


@by_example
def test_every_port_that_is_named_exists(example: Path | None) -> None:
    manifests = manifests_of(example)
    deployments = pod_makers(manifests)
    for deployment in deployments.values():
        container = container_of(deployment)
        ports = container.get("ports", [])
        names, numbers = {port["name"] for port in ports}, {port["containerPort"] for port in ports}
        assert len(names) == len(numbers) == len(ports)
        probed = {port for probe in probes_of(container) for port in ports_of_probe(probe)}
        assert probed <= names | numbers
    for service in of_kind(manifests, "Service").values():
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        selected = [d for d in deployments.values() if is_selected(d, service["spec"]["selector"])]
        assert selected
        offered = [{port["name"] for port in container_of(deployment)["ports"]} for deployment in selected]
        assert targets <= set.union(*offered), "some pod has each of its ports"
        first = {target for target in targets if not target[-1].isdigit()}
        assert all(first <= names for names in offered), "every pod has the first of each"
    services = of_kind(manifests, "Service")
    for monitor in of_kind(manifests, "ServiceMonitor").values():
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (s for s in services.values() if wanted.items() <= s["metadata"]["labels"].items())
        names = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= names


@by_example
def test_every_selector_selects_pods_of_the_release(example: Path | None) -> None:
    manifests = manifests_of(example)
    deployments = list(pod_makers(manifests).values())
    for deployment in deployments:
        if "selector" in deployment["spec"]:
            own = deployment["spec"]["selector"]["matchLabels"]
            assert [d for d in deployments if is_selected(d, own)] == [deployment]
        for spread in pod_of(deployment).get("topologySpreadConstraints", []):
            assert [d for d in deployments if is_selected(d, spread["labelSelector"]["matchLabels"])] == [
                deployment
            ]
    for budget in of_kind(manifests, "PodDisruptionBudget").values():
        wanted = budget["spec"]["selector"]["matchLabels"]
        assert len({d["metadata"]["name"] for d in deployments if is_selected(d, wanted)}) == 1
    (test,) = of_kind(manifests, "Pod").values()
    selectable = [*deployments, {"spec": {"template": test}}]
    for policy in of_kind(manifests, "NetworkPolicy").values():
        assert [d for d in selectable if is_selected(d, policy["spec"]["podSelector"]["matchLabels"])]


@by_example
def test_whatever_an_object_refers_to_by_name_is_in_the_release(example: Path | None) -> None:
    manifests = manifests_of(example)
    accounts = {m["metadata"]["name"] for m in of_kind(manifests, "ServiceAccount").values()}
    for deployment in pod_makers(manifests).values():
        pod = pod_of(deployment)
        assert pod["serviceAccountName"] in accounts
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert sorted(volumes) == sorted(
            {mount["name"] for mount in container_of(deployment)["volumeMounts"]}
        )
    roles = {m["metadata"]["name"] for m in of_kind(manifests, "Role").values()}
    for binding in of_kind(manifests, "RoleBinding").values():
        assert binding["roleRef"]["name"] in roles
        assert {subject["name"] for subject in binding["subjects"]} <= accounts


@by_example
def test_a_container_that_fails_says_why_and_pods_that_are_not_ready_keep_no_node(
    example: Path | None,
) -> None:
    manifests = manifests_of(example)
    for maker in pod_makers(manifests).values():
        assert container_of(maker)["terminationMessagePolicy"] == "FallbackToLogsOnError"
    for budget in of_kind(manifests, "PodDisruptionBudget").values():
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@by_example
def test_every_object_is_in_the_releases_namespace(example: Path | None) -> None:
    assert {manifest["metadata"]["namespace"] for manifest in manifests_of(example)} == {NAMESPACE}


def probes_of(container: Manifest) -> Iterator[Manifest]:
    names = ("startupProbe", "readinessProbe", "livenessProbe")
    return (container[name] for name in names if name in container)


def ports_of_probe(probe: Manifest) -> Iterator[Any]:
    return (probe[how]["port"] for how in ("httpGet", "grpc") if how in probe)


def is_selected(deployment: Manifest, labels: dict[str, str]) -> bool:
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return labels.items() <= found.items()
