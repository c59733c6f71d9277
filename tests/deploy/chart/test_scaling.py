"""Pools are scaled on metrics that servers have, by whichever of the two scalers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from testing.deploy.helm import DEPLOY, NAMESPACE, RELEASE, Refusal, of_kind, render

ADAPTER = DEPLOY / "observability" / "prometheus-adapter.yaml"
METRICS_PAGE = DEPLOY.parent / "docs" / "metrics.md"
ALL_MEASURES = {"queueSeconds": 0.25, "usedPercent": 70, "tokenSeconds": 0.04}
TARGETS = {
    "twinfang_request_queue_seconds_mean": "0.25",
    "twinfang_rows_used_percent": "70",
    "twinfang_kv_blocks_used_percent": "70",
    "twinfang_inter_token_latency_seconds_mean": "0.04",
}


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    autoscaling = {"enabled": True, "kind": kind, "minReplicas": 2, "maxReplicas": 8} | more
    return {
        "poolDefaults": {"autoscaling": autoscaling},
        "keda": {"prometheusAddress": "http://prometheus:9090"},
    }


def metrics_of_servers() -> set[str]:
    _, _, servers = METRICS_PAGE.read_text(encoding="utf-8").partition("## Servers")
    names = set()
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", servers, re.MULTILINE):
        names |= {f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\btwinfang_\w+", text))


def rules_of_adapter() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(ADAPTER.read_text(encoding="utf-8"))["rules"]["custom"]
    return rules


def test_a_horizontal_pod_autoscaler_asks_for_what_the_adapter_gives() -> None:
    scalers = of_kind(render(scaled("hpa", **ALL_MEASURES)), "HorizontalPodAutoscaler")
    assert set(scalers) == {"prefill-default", "decode-default"}
    asked = {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for scaler in scalers.values()
        for metric in scaler["spec"]["metrics"]
    }
    assert asked == TARGETS
    assert set(asked) == {rule["name"]["as"] for rule in rules_of_adapter()}


def test_keda_asks_prometheus_for_the_same_of_one_pool() -> None:
    scalers = of_kind(render(scaled("keda", **ALL_MEASURES)), "ScaledObject")
    triggers = [trigger for scaler in scalers.values() for trigger in scaler["spec"]["triggers"]]
    assert {trigger["name"]: trigger["metadata"]["threshold"] for trigger in triggers} == TARGETS
    by_adapter = {rule["name"]["as"]: metrics_in(rule["metricsQuery"]) for rule in rules_of_adapter()}
    for trigger in triggers:
        role = "prefill" if "queue" in trigger["name"] else "decode"
        series = f'namespace="{NAMESPACE}",service="{RELEASE}-twinfang-{role}",pool="default"'
        query = trigger["metadata"]["query"]
        assert set(re.findall(r"\{(.*?)\}", query)) == {series}
        assert metrics_in(query) == by_adapter[trigger["name"]]


def test_every_metric_that_is_asked_for_is_one_that_servers_have() -> None:
    asked = {name for rule in rules_of_adapter() for name in metrics_in(rule["metricsQuery"])}
    assert asked
    assert asked <= metrics_of_servers()


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_a_pool_that_is_scaled_has_no_number_of_replicas_of_its_own(kind: str) -> None:
    manifests = render(scaled(kind) | {"decodePools": {"still": {"autoscaling": {"enabled": False}}}})
    deployments = of_kind(manifests, "Deployment")
    assert {name for name, one in deployments.items() if "replicas" in one["spec"]} == {
        "router",
        "decode-still",
    }
    names = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
    for name, scaler in of_kind(manifests, names[kind]).items():
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployments[name]["metadata"]["name"]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            scaled("hpa", minReplicas=9),
            r"prefillPools\.default\.autoscaling: minReplicas 9 is above maxReplicas 8",
        ),
        (scaled("keda") | {"keda": {}}, r"set keda\.prometheusAddress"),
    ],
)
def test_scaling_that_could_not_work_is_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(Refusal, match=complaint):
        render(values)
