"""What the chart gives Prometheus and Grafana: each release sees its own processes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.deploy.expressions import parse, selectors
from testing.deploy.helm import NAMESPACE, RELEASE, Manifest, Refusal, render
from testing.deploy.observability import dashboard, promtool, rules

NAME = f"{RELEASE}-twinfang"


def rendered(kind: str, **monitoring: Any) -> list[Manifest]:
    found = render({"monitoring": monitoring})
    return [manifest for manifest in found if manifest["kind"] == kind]


def rule_groups(**values: Any) -> dict[str, Any]:
    (rule,) = rendered("PrometheusRule", prometheusRule={"enabled": True, **values})
    spec: dict[str, Any] = rule["spec"]
    return spec


def by_name(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Recording rules."""
    return {rule["record"]: rule for group in spec["groups"] for rule in group["rules"] if "record" in rule}


def test_nothing_is_rendered_unless_it_is_asked_for() -> None:
    for kind in ("PrometheusRule", "ServiceMonitor"):
        assert not rendered(kind)
    assert not [m for m in rendered("ConfigMap") if "grafana_dashboard" in m["metadata"]["labels"]]


def test_rules_are_those_of_the_file_for_this_release_alone(tmp_path: Path) -> None:
    spec = rule_groups()
    found = [rule for group in spec["groups"] for rule in group["rules"]]
    assert len(found) == len(rules())
    for rule, own in zip(rules(), found, strict=True):
        assert own["labels"] == rule.labels | {"namespace": NAMESPACE, "release": RELEASE}
        assert own.get("annotations", {}) == rule.annotations
        for selector in selectors(parse(own["expr"])):
            matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert (matchers["namespace"], matchers["release"]) == (NAMESPACE, RELEASE)
            assert "job" in matchers
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(spec), encoding="utf-8")
    promtool("check", "rules", file)


def test_objectives_come_from_the_values() -> None:
    assert by_name(rule_groups())["twinfang:tpot_objective:seconds"]["expr"] == "vector(0.1)"
    changed = by_name(rule_groups(objectives={"ttft": {"seconds": "1.0", "ratio": 0.95}}))
    seconds = changed["twinfang:ttft_objective:seconds"]
    assert (seconds["expr"], seconds["labels"]["le"]) == ("vector(1.0)", "1.0")
    assert changed["twinfang:ttft_objective:ratio"]["expr"] == "vector(0.95)"
    assert changed["twinfang:tpot_objective:seconds"]["labels"]["le"] == "0.1"


def test_a_server_that_loads_raises_no_alert_before_its_pool_gives_it_up() -> None:
    pools = {
        "poolDefaults": {"startTimeoutSeconds": 600},
        "decodePools": {"large": {"startTimeoutSeconds": 7200}},
    }
    found = render({"monitoring": {"prometheusRule": {"enabled": True}}} | pools)
    (spec,) = (manifest["spec"] for manifest in found if manifest["kind"] == "PrometheusRule")
    by_alert = {rule["alert"]: rule for group in spec["groups"] for rule in group["rules"] if "alert" in rule}
    assert by_alert["TwinfangServerDoesNotStart"]["for"] == "7800s"
    assert "starting" not in by_alert["TwinfangServerNotReady"]["expr"]


@pytest.mark.parametrize("objective", [{"seconds": "3"}, {"seconds": 2.5}, {"ratio": 99}, {"ratio": 0.9}])
def test_objectives_that_no_bucket_or_no_alert_knows_are_refused(objective: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="objectives/ttft"):
        rule_groups(objectives={"ttft": objective})


def test_links_to_runbooks_get_the_base_of_the_values() -> None:
    spec = rule_groups(runbookBaseUrl="https://example.com/x/", labels={"team": "inference"})
    links = {r["annotations"]["runbook_url"] for g in spec["groups"] for r in g["rules"] if "alert" in r}
    assert all(link.startswith("https://example.com/x/docs/runbooks/Twinfang") for link in links)


def test_the_dashboard_is_the_file_with_the_label_that_grafana_looks_for() -> None:
    found = rendered("ConfigMap", dashboard={"enabled": True, "labels": {"team": "inference"}})
    (one,) = [m for m in found if m["metadata"]["name"] == f"{NAME}-dashboard"]
    assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert one["metadata"]["labels"]["team"] == "inference"
    assert json.loads(one["data"]["twinfang.json"]) == dashboard()


def test_scraping_gives_targets_the_labels_that_rules_and_dashboard_ask_for() -> None:
    found = rendered("ServiceMonitor", serviceMonitor={"enabled": True})
    jobs = {monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] for monitor in found}
    assert jobs == {"router", "prefill", "decode"}
    for monitor in found:
        assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/component"
        (endpoint,) = monitor["spec"]["endpoints"]
        given = {relabeling["targetLabel"] for relabeling in endpoint["relabelings"]}
        is_router = monitor["metadata"]["name"].endswith("-router")
        assert given == {"release", "instance"} | (set() if is_router else {"pool"})
