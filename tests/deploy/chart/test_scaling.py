"""Pools are scaled on metrics that servers have, by whichever of the two scalers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from testing.deploy.helm import DEPLOY, NAMESPACE, RELEASE, Refusal, of_kind, render
from testing.deploy.live_objects import render_upgrade

ADAPTER = DEPLOY / "observability" / "prometheus-adapter.yaml"
METRICS_PAGE = DEPLOY.parent / "docs" / "metrics.md"
ALL_MEASURES = {"queueSeconds": 0.25, "usedPercent": 70, "tokenSeconds": 0.04}
TARGETS = {
    "twinfang_router_wait_seconds": "0.25",
    "twinfang_busy_percent": "70",
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


def several(*names: str) -> dict[str, Any]:
    """Values of several models, each with a pool of each role."""
    volume = {"hostPath": {"path": "/models"}}
    return {
        "models": [
            {"name": name, "directory": f"m{i}", "volume": volume}
            | {f"{role}Pools": {f"m{i}": {}} for role in ("prefill", "decode")}
            for i, name in enumerate(names)
        ]
    }


def metrics_of(heading: str) -> set[str]:
    _, _, rest = METRICS_PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")
    names = set()
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", rest.partition("\n## ")[0], re.MULTILINE):
        names |= {f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\btwinfang_\w+", text))


def metrics_of_rule(name: str) -> set[str]:
    (query,) = [rule["metricsQuery"] for rule in rules_of_adapter() if rule["name"]["as"] == name]
    return metrics_in(query)


def rules_of_adapter() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(ADAPTER.read_text(encoding="utf-8"))["rules"]["custom"]
    return rules


def test_a_horizontal_pod_autoscaler_asks_for_what_the_adapter_gives() -> None:
    scalers = of_kind(render(scaled("hpa", **ALL_MEASURES)), "HorizontalPodAutoscaler")
    assert set(scalers) == {"prefill-default", "decode-default"}
    asked = {}
    for scaler in scalers.values():
        for metric in scaler["spec"]["metrics"]:
            one = metric[metric["type"].lower()]
            asked[one["metric"]["name"]] = one["target"].get("averageValue") or one["target"]["value"]
            if metric["type"] == "Object":
                assert one["describedObject"]["name"] == f"{RELEASE}-twinfang-router"
                assert metrics_of_rule(one["metric"]["name"]) <= metrics_of("Router")
    assert asked == TARGETS
    assert set(asked) == {rule["name"]["as"] for rule in rules_of_adapter()}


def test_an_autoscaler_asks_for_the_wait_of_its_own_model_if_there_are_several() -> None:
    scalers = of_kind(render(scaled("hpa") | several("a", "b")), "HorizontalPodAutoscaler")
    for i, name in enumerate("ab"):
        metrics = scalers[f"prefill-m{i}"]["spec"]["metrics"]
        (asked,) = [metric["object"]["metric"] for metric in metrics if metric["type"] == "Object"]
        assert asked["selector"] == {"matchLabels": {"model": name}}


def test_keda_asks_prometheus_for_the_same_of_one_pool() -> None:
    scalers = of_kind(render(scaled("keda", **ALL_MEASURES)), "ScaledObject")
    triggers = [trigger for scaler in scalers.values() for trigger in scaler["spec"]["triggers"]]
    assert {trigger["name"]: trigger["metadata"]["threshold"] for trigger in triggers} == TARGETS
    for trigger in triggers:
        role = {"twinfang_router_wait_seconds": "router", "twinfang_busy_percent": "prefill"}
        where = role.get(trigger["name"], "decode")
        pool = "" if where == "router" else ',pool="default"'
        series = f'namespace="{NAMESPACE}",service="{RELEASE}-twinfang-{where}"{pool}'
        query = trigger["metadata"]["query"]
        assert set(re.findall(r"\{(.*?)\}", query)) == {series}
        assert metrics_in(query) == metrics_of_rule(trigger["name"])


def test_every_metric_that_is_asked_for_is_one_that_processes_have() -> None:
    asked = {name for rule in rules_of_adapter() for name in metrics_in(rule["metricsQuery"])}
    assert asked
    assert asked <= metrics_of("Router") | metrics_of("Servers")


def test_keda_keeps_a_pool_as_it_is_while_it_has_no_metrics() -> None:
    for scaler in of_kind(render(scaled("keda", **ALL_MEASURES)), "ScaledObject").values():
        assert {trigger["metadata"]["ignoreNullValues"] for trigger in scaler["spec"]["triggers"]} == {
            "false"
        }
        fallback = {"failureThreshold": 3, "replicas": 2, "behavior": "currentReplicasIfHigher"}
        assert scaler["spec"]["fallback"] == fallback


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


def test_switching_scaling_on_keeps_the_replicas_that_run() -> None:
    before = {"prefillPools": {"default": {"replicas": 3}}, "decodePools": {"default": {"replicas": 5}}}
    running = render(before)
    of_kind(running, "Deployment")["decode-default"]["spec"]["replicas"] = 7  # as somebody has scaled it
    running += of_kind(render(scaled("hpa")), "HorizontalPodAutoscaler").values()  # its kind exists
    after = of_kind(render_upgrade(before | scaled("hpa"), running), "Deployment")
    assert after["prefill-default"]["spec"]["replicas"] == 3
    assert after["decode-default"]["spec"]["replicas"] == 7


def test_the_planner_is_scraped_wherever_servers_are() -> None:
    monitors = {"monitoring": {"serviceMonitor": {"enabled": True, "labels": {"team": "inference"}}}}
    assert not of_kind(render(monitors), "PodMonitor")
    manifests = render(monitors | {"autoscale": {"enabled": True}})
    (monitor,) = of_kind(manifests, "PodMonitor").values()
    planner = of_kind(manifests, "Deployment")["autoscale"]["spec"]["template"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= planner["metadata"]["labels"].items()
    assert planner["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "autoscale"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in planner["spec"]["containers"][0]["ports"]}
    assert {one["targetLabel"] for one in endpoint["relabelings"]} == {"release", "instance"}
    assert monitor["metadata"]["labels"]["team"] == "inference"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            scaled("hpa", minReplicas=9),
            r"prefillPools\.default\.autoscaling: minReplicas 9 is above maxReplicas 8",
        ),
        (scaled("keda") | {"keda": {}}, r"set keda\.prometheusAddress"),
        (scaled("hpa") | several("a", "b/c"), r"b/c is no value of a label: set kind keda, or a models"),
    ],
)
def test_scaling_that_could_not_work_is_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(Refusal, match=complaint):
        render(values)
