"""Mutual TLS in the chart: which certificate each container has, and who checks what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from testing.deploy.helm import EXAMPLES, KUBERNETES_VERSIONS, Manifest, Refusal, render

CERT_MANAGER: Manifest = {
    "tls": {"enabled": True, "issuerRef": {"name": "twinfang", "kind": "Issuer"}},
    "autoscale": {"enabled": True},
    "monitoring": {"serviceMonitor": {"enabled": True}},
}
SECRETS = {role: f"our-{role}" for role in ("router", "server", "operator")}
CUSTOM_RESOURCES = {"Certificate", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
NAMES = "{role}.llm.example.com"
GIVEN: Manifest = CERT_MANAGER | {"tls": {"enabled": True, "secrets": SECRETS, "names": NAMES}}


def manifests_of(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pod_of(manifest: Manifest) -> Any:
    return manifest["spec"]["template"]["spec"]


@pytest.fixture(scope="module", params=["cert-manager", "secrets"])
def secure(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(CERT_MANAGER if request.param == "cert-manager" else GIVEN)


def test_cert_manager_makes_a_certificate_for_each_role() -> None:
    certificates = manifests_of(render(CERT_MANAGER), "Certificate")
    names = [one["spec"]["dnsNames"][0] for one in certificates]
    assert len({name.partition(".")[2] for name in names}) == 1
    assert [name.partition(".")[0] for name in names] == ["router", "server", "operator"]
    assert all({"server auth", "client auth"} <= set(one["spec"]["usages"]) for one in certificates)
    assert manifests_of(render(GIVEN), "Certificate") == []


def test_every_process_shows_a_certificate_from_a_mounted_secret(secure: list[Manifest]) -> None:
    names = set()
    for deployment in manifests_of(secure, "Deployment"):
        (container, *_), pod = pod_of(deployment)["containers"], pod_of(deployment)
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one.get("secret", {}).get("secretName") for one in pod["volumes"]}
        files = dict(
            one.split("=") for one in container["args"] if one.startswith("--tls-c") or "--tls-k" in one
        )
        role = {"router": "router", "autoscale": "operator"}.get(container["name"], "server")
        assert files.keys() == {"--tls-cert", "--tls-key", "--tls-ca"}
        for path in files.values():
            folder = path.rpartition("/")[0]
            assert folder.endswith(f"tls-{role}")
            assert role in volumes[mounts[folder]]
        names |= {one for one in container["args"] if one.startswith("--tls-names=")}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["scheme"] == "HTTPS", (container["name"], probe)
        if role == "server":
            command = container["lifecycle"]["preStop"]["exec"]["command"]
            assert "--tls-cert=/etc/twinfang/tls-operator/tls.crt" in command
            assert "/etc/twinfang/tls-operator" in mounts
    assert len(names) == 1


def test_metrics_are_read_with_the_operators_certificate(secure: list[Manifest]) -> None:
    for monitor in manifests_of(secure, "ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["scheme"] == "https"
            role = "router" if monitor["metadata"]["name"].endswith("router") else "server"
            assert endpoint["tlsConfig"]["serverName"].startswith(f"{role}.")
            assert role == "router" or "operator" in endpoint["tlsConfig"]["keySecret"]["name"]
    (planner,) = [
        one for one in manifests_of(secure, "Deployment") if one["metadata"]["name"].endswith("autoscale")
    ]
    urls = [one for one in pod_of(planner)["containers"][0]["args"] if "-metrics=" in one]
    assert len(urls) >= 3
    assert all("=https://" in one for one in urls)


@pytest.mark.parametrize("version", [KUBERNETES_VERSIONS[0], KUBERNETES_VERSIONS[-1]])
def test_kubernetes_takes_every_object(version: str) -> None:
    for values in (CERT_MANAGER, GIVEN):
        for manifest in render(values, kube_version=version):
            if manifest["kind"] not in CUSTOM_RESOURCES:
                kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_every_example_goes_with_it(example: Path) -> None:
    plain, secure = (
        {one["metadata"]["name"]: pod_of(one) for one in manifests_of(render(values, example), "Deployment")}
        for values in ({}, {"tls": GIVEN["tls"]})
    )
    assert plain.keys() == secure.keys()
    for name, pod in secure.items():
        (container, *_), (before, *_) = pod["containers"], plain[name]["containers"]
        assert any(one.startswith("--tls-cert=") for one in container["args"]), name
        assert container["securityContext"] == before["securityContext"]
        assert all(one["readOnly"] for one in container["volumeMounts"] if "tls-" in one["mountPath"])
        assert pod["securityContext"] == plain[name]["securityContext"]
        assert pod["automountServiceAccountToken"] == plain[name]["automountServiceAccountToken"]


def test_without_it_nothing_is_mounted_and_nothing_is_said() -> None:
    assert "tls-server" not in str(render({}))
    assert "--tls-" not in str(render({}))


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ({"enabled": True}, "set tls.issuerRef to an issuer of cert-manager, or tls.secrets.router"),
        ({"enabled": True, "secrets": {"router": "a"}}, "set tls.issuerRef to an issuer"),
        ({"enabled": True, "secrets": SECRETS, "issuerRef": {"name": "a"}}, "leave one of the two out"),
        ({"enabled": True, "secrets": SECRETS, "names": "a.example"}, "has to stand in it"),
    ],
)
def test_what_can_not_work_is_refused(tls: Manifest, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        render({"tls": tls})
