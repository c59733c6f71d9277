"""Routers that speak HTTPS, and all that asks them."""

from __future__ import annotations

import kubernetes_validate
import pytest

from testing.deploy.helm import Manifest, Parse, Refusal, container_of, of_kind, render

TLS = {"secretName": "llm-tls", "serverName": "llm.example.com", "caKey": "ca.crt"}
VALUES: Manifest = {
    "router": {"tls": TLS},
    "autoscale": {"enabled": True},
    "monitoring": {"serviceMonitor": {"enabled": True}},
}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(VALUES)


def test_a_router_reads_its_certificate_from_the_secret(manifests: list[Manifest], parse: Parse) -> None:
    deployment = of_kind(manifests, "Deployment")["router"]
    kubernetes_validate.validate(deployment, "1.27", strict=True)
    container, pod = container_of(deployment), deployment["spec"]["template"]["spec"]
    given = parse(container["args"])
    assert given.ssl_certfile is not None
    assert given.ssl_keyfile is not None
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "tls"]
    assert f"--ssl-certfile={mount['mountPath']}/tls.crt" in container["args"]
    assert f"--ssl-keyfile={mount['mountPath']}/tls.key" in container["args"]
    assert "subPath" not in mount, "such a file never changes"
    (volume,) = [one for one in pod["volumes"] if one["name"] == "tls"]
    assert volume["secret"]["secretName"] == "llm-tls"
    assert {container[probe]["httpGet"]["scheme"] for probe in PROBES} == {"HTTPS"}


def test_the_services_say_https(manifests: list[Manifest]) -> None:
    for name in ("router", "router-metrics"):
        (port,) = of_kind(manifests, "Service")[name]["spec"]["ports"]
        assert port["appProtocol"] == "https"


def test_prometheus_and_the_autoscaler_check_the_certificate(manifests: list[Manifest], parse: Parse) -> None:
    (endpoint,) = of_kind(manifests, "ServiceMonitor")["router"]["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": "llm.example.com",
        "ca": {"secret": {"name": "llm-tls", "key": "ca.crt"}},
    }
    deployment = of_kind(manifests, "Deployment")["autoscale"]
    kubernetes_validate.validate(deployment, "1.27", strict=True)
    given = parse(container_of(deployment)["args"])
    (url,) = given.router_metrics
    assert url.startswith("https://")
    assert (given.router_server_name, given.router_ca_file is None) == ("llm.example.com", False)
    secrets = [one["secret"] for one in deployment["spec"]["template"]["spec"]["volumes"] if "secret" in one]
    assert [secret["items"] for secret in secrets] == [[{"key": "ca.crt", "path": "ca.crt"}]], "not the key"


def test_helm_test_asks_by_https(manifests: list[Manifest]) -> None:
    pod = of_kind(manifests, "Pod")["test"]
    kubernetes_validate.validate(pod, "1.27", strict=True)
    environment = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    assert environment["URL"].startswith("https://")
    assert environment["SERVER_NAME"] == "llm.example.com"
    assert environment["CA_FILE"] == "/etc/twinfang/router-ca/ca.crt"


def test_without_a_name_only_what_scales_is_refused() -> None:
    unnamed = {"router": {"tls": {"secretName": "llm-tls"}}}
    (endpoint,) = of_kind(
        render(unnamed | {"monitoring": {"serviceMonitor": {"enabled": True}}}), "ServiceMonitor"
    )["router"]["spec"]["endpoints"]
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}
    with pytest.raises(Refusal, match=r"set router\.tls\.serverName"):
        render(unnamed | {"autoscale": {"enabled": True}})


def test_without_a_secret_there_is_no_trace_of_it() -> None:
    deployment = of_kind(render({}), "Deployment")["router"]
    container = container_of(deployment)
    assert not [argument for argument in container["args"] if "ssl" in argument]
    assert {container[probe]["httpGet"]["scheme"] for probe in PROBES} == {"HTTP"}


@pytest.mark.parametrize(
    ("values", "host"),
    [
        ({}, "0.0.0.0"),
        ({"ipFamily": "IPv6"}, "::"),
        ({"ipFamilyPolicy": "PreferDualStack"}, "::"),
        ({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}, "::"),
        ({"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"]}, "0.0.0.0"),
    ],
)
def test_services_and_processes_are_of_the_families_that_are_asked_for(values: Manifest, host: str) -> None:
    manifests = render(values | {"autoscale": {"enabled": True}})
    for service in of_kind(manifests, "Service").values():
        kubernetes_validate.validate(service, "1.27", strict=True)
        assert service["spec"].get("ipFamilyPolicy", "") == values.get("ipFamilyPolicy", "")
        assert service["spec"].get("ipFamilies", []) == values.get("ipFamilies", [])
    for deployment in of_kind(manifests, "Deployment").values():
        assert f"--host={host}" in container_of(deployment)["args"]
