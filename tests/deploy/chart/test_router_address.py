"""How requests reach routers, and how many routers there are."""

from __future__ import annotations

import kubernetes_validate
import pytest

from testing.deploy.helm import Manifest, Refusal, container_of, of_kind, render

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
