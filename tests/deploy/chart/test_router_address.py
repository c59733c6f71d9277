"""How requests reach routers, and how many routers there are."""

from __future__ import annotations

import kubernetes_validate
import pytest

from testing.deploy.helm import Manifest, Parse, Refusal, container_of, of_kind, render

VALUES: Manifest = {
    "router": {"autoscaling": {"enabled": True, "minReplicas": 3}, "service": {"stickySeconds": 3600}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
        "hosts": ["llm.example.com", "chat.example.com"],
        "tls": [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}],
    },
    "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "timeout": "none"},
}


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(VALUES)


def test_an_ingress_leads_to_the_routers_service(manifests: list[Manifest]) -> None:
    ingress = of_kind(manifests, "Ingress")["router"]
    kubernetes_validate.validate(ingress, "1.27", strict=True)
    service = of_kind(manifests, "Service")["router"]
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == VALUES["ingress"]["hosts"]
    for rule in ingress["spec"]["rules"]:
        paths = rule["http"]["paths"]
        assert [path["path"] for path in paths] == ["/v1", "/tokenize", "/detokenize"], "and not /metrics"
        for path in paths:
            assert path["backend"]["service"]["name"] == service["metadata"]["name"]
            assert path["backend"]["service"]["port"]["name"] in {
                one["name"] for one in service["spec"]["ports"]
            }


def test_a_client_may_keep_its_router(manifests: list[Manifest]) -> None:
    service = of_kind(manifests, "Service")["router"]
    kubernetes_validate.validate(service, "1.27", strict=True)
    assert service["spec"]["sessionAffinity"] == "ClientIP"
    assert service["spec"]["sessionAffinityConfig"] == {"clientIP": {"timeoutSeconds": 3600}}


def test_an_ingress_without_a_host_takes_any() -> None:
    ingress = of_kind(render({"ingress": {"enabled": True}}), "Ingress")["router"]
    kubernetes_validate.validate(ingress, "1.37", strict=True)
    assert ["host" in rule for rule in ingress["spec"]["rules"]] == [False]


def test_a_route_for_a_gateway_without_timeouts_has_none(manifests: list[Manifest]) -> None:
    (rule,) = of_kind(manifests, "HTTPRoute")["router"]["spec"]["rules"]
    assert "timeouts" not in rule


def test_an_autoscaler_scales_the_routers_by_the_cpu_that_they_ask_for(manifests: list[Manifest]) -> None:
    scaler = of_kind(manifests, "HorizontalPodAutoscaler")["router"]
    kubernetes_validate.validate(scaler, "1.27", strict=True)
    router = of_kind(manifests, "Deployment")["router"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == router["metadata"]["name"]
    assert "replicas" not in router["spec"], "or every upgrade would undo what the autoscaler did"
    (metric,) = scaler["spec"]["metrics"]
    assert metric["containerResource"]["container"] == container_of(router)["name"]
    assert container_of(router)["resources"]["requests"]["cpu"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 8)


@pytest.mark.parametrize(
    ("router", "complaint"),
    [
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas 9 is above maxReplicas 8"),
        (
            {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}},
            "set router.resources.requests.cpu",
        ),
    ],
)
def test_an_autoscaler_that_can_not_work_is_refused(router: Manifest, complaint: str) -> None:
    with pytest.raises(Refusal) as refusal:
        render({"router": router})
    assert complaint in refusal.value.message


# --- HTTPS and address families

TLS = {"secretName": "llm-tls", "serverName": "llm.example.com", "caKey": "ca.crt"}
WITH_TLS: Manifest = {
    "router": {"tls": TLS},
    "autoscale": {"enabled": True},
    "monitoring": {"serviceMonitor": {"enabled": True}},
}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(scope="module")
def secure() -> list[Manifest]:
    return render(WITH_TLS)


def test_a_router_reads_its_certificate_from_the_secret(secure: list[Manifest], parse: Parse) -> None:
    deployment = of_kind(secure, "Deployment")["router"]
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


def test_the_services_say_https(secure: list[Manifest]) -> None:
    for name in ("router", "router-metrics"):
        (port,) = of_kind(secure, "Service")[name]["spec"]["ports"]
        assert port["appProtocol"] == "https"


def test_prometheus_and_the_autoscaler_check_the_certificate(secure: list[Manifest], parse: Parse) -> None:
    (endpoint,) = of_kind(secure, "ServiceMonitor")["router"]["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": "llm.example.com",
        "ca": {"secret": {"name": "llm-tls", "key": "ca.crt"}},
    }
    deployment = of_kind(secure, "Deployment")["autoscale"]
    kubernetes_validate.validate(deployment, "1.27", strict=True)
    given = parse(container_of(deployment)["args"])
    (url,) = given.router_metrics
    assert url.startswith("https://")
    assert (given.router_server_name, given.router_ca_file is None) == ("llm.example.com", False)
    secrets = [one["secret"] for one in deployment["spec"]["template"]["spec"]["volumes"] if "secret" in one]
    assert [secret["items"] for secret in secrets] == [[{"key": "ca.crt", "path": "ca.crt"}]], "not the key"


def test_helm_test_asks_by_https(secure: list[Manifest]) -> None:
    pod = of_kind(secure, "Pod")["test"]
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
