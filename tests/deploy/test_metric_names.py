"""Whatever rules, dashboard and documents select is what the processes export."""

import asyncio
import json
import re
from pathlib import Path

import promql_parser as promql
import pytest

from testing.deploy.exported import JOBS, TARGET_LABELS, Exports, exported_pages
from testing.deploy.expressions import defined, parse, result_labels, selectors
from testing.deploy.observability import ROOT, VARIABLES, dashboard, panels, queries, rules

HISTOGRAMS = {
    "ttft": "twinfang_time_to_first_token_seconds",
    "tpot": "twinfang_inter_token_latency_seconds",
}
METRICS = ROOT / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return asyncio.run(exported_pages(tmp_path_factory.mktemp("exported")))


@pytest.fixture(scope="module")
def exports(pages):
    found = Exports(pages)
    for rule in rules():
        if not rule.is_alert:
            labels = result_labels(parse(rule.expr), found.labels_of)
            found.add_recorded(rule.name, frozenset(labels) | set(rule.labels))
    return found


# --- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.name}-{rule.labels.get('severity', '')}")
def test_a_rule_selects_what_is_exported_and_tells_by_labels_that_it_has(exports, rule):
    labels = result_labels(parse(rule.expr), exports.labels_of) | set(rule.labels)
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule.annotations.values())))
    assert told <= labels
    if not rule.is_alert:
        assert labels - {"le"} == {"job"}, "so that any two of them match"


def test_objectives_are_bounds_of_the_histograms_that_they_are_compared_with(pages):
    recorded = {rule.name: rule for rule in rules() if not rule.is_alert}
    for objective, metric in HISTOGRAMS.items():
        rule = recorded[f"twinfang:{objective}_objective:seconds"]
        assert rule.labels["le"] in pages["router"][f"{metric}_bucket"]["le"]
        assert rule.expr == f"vector({rule.labels['le']})"


def test_what_is_recorded_is_used():
    used = {s.name for rule in rules() for s in selectors(parse(rule.expr))}
    used |= {s.name for query in queries() for s in selectors(parse(query.expr, variables=VARIABLES))}
    assert {rule.name for rule in rules() if not rule.is_alert} <= used


# --- dashboard -------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: f"{query.panel}-{query.legend}")
def test_a_panel_selects_what_is_exported_and_is_told_apart_by_labels_that_it_has(exports, query):
    labels = result_labels(parse(query.expr, variables=VARIABLES), exports.labels_of)
    assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) == labels


def test_variables_of_the_dashboard_are_declared_and_used():
    declared = {one["name"]: one for one in dashboard()["templating"]["list"]}
    asking = [str(one.get("query")) for one in declared.values()]
    used = set(re.findall(r"\$(\w+)", " ".join([*asking, *(query.expr for query in queries())])))
    used.remove("__rate_interval")
    assert used == declared.keys() - {"datasource"}
    for panel in panels():
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_variables_ask_for_labels_of_what_is_exported(exports):
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            inner, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            (selector,) = selectors(parse(inner, variables=VARIABLES))
            assert label in exports.labels_of(selector)


def test_panels_say_what_they_show_in_which_unit_and_do_not_overlap():
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in panels():
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


# --- documents -------------------------------------------------------------------------------------


def test_queries_of_the_documents_select_what_is_exported(exports):
    _, _, table = METRICS.read_text(encoding="utf-8").partition("## What to look at")
    found = [text for row in table.splitlines() if row[:1] == "|" for text in re.findall(r"`([^`]+)`", row)]
    assert len(found) >= 8
    for text in found:
        for selector in selectors(parse(text.replace("\\|", "|"))):
            exports.labels_of(selector)


def test_the_table_of_metrics_names_the_labels_that_they_have(pages):
    for heading, job in (("Router", "router"), ("Servers", "decode"), ("Autoscale", "autoscale")):
        section = METRICS.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"(?m)^\| `(twinfang_\w+)` \| (\w+) \| ([^|]*) \|", section)
        assert rows
        for name, kind, labels in rows:
            suffix = {"histogram": "_count", "info": "_info"}.get(kind, "")
            sample = name if name in pages[job] else name + suffix
            documented = set(re.findall(r"`(\w+)`", labels))
            if sample in pages[job]:
                assert pages[job][sample].keys() == documented, name


def test_bounds_of_the_document_and_of_the_charts_schema_are_those_of_the_histograms(pages):
    document = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    schema = json.loads((ROOT / "deploy/helm/twinfang/values.schema.json").read_text(encoding="utf-8"))
    monitoring = schema["properties"]["monitoring"]["properties"]
    objectives = monitoring["prometheusRule"]["properties"]["objectives"]["properties"]
    for objective, metric in HISTOGRAMS.items():
        bounds = pages["router"][f"{metric}_bucket"]["le"] - {"+Inf"}
        (row,) = re.findall(rf"(?m)^\| `{objective}` \| ([\d., ]+) \|$", document)
        assert set(row.split(", ")) == bounds
        assert set(objectives[objective]["properties"]["seconds"]["enum"]) == bounds


def test_metrics_that_are_named_in_the_deployment_and_in_runbooks_are_exported(pages):
    """Scaling rules, which are templates and can't be parsed."""
    exported = {name for page in pages.values() for name in page}
    families = {name.removesuffix("_count") for name in exported}
    files = [*(ROOT / "deploy").rglob("*.*"), *(ROOT / "docs" / "runbooks").glob("*.md")]
    texts = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    made_by_the_adapter = set(re.findall(r"name: \{as: (\w+)\}", text))
    named = set(re.findall(r"\btwinfang_[a-z_]+", text))
    assert len(named) > 50
    assert named <= exported | families | made_by_the_adapter


# --- what finds them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("twinfang_no_such_thing{job='router'}", "router exports no twinfang_no_such_thing"),
        ("twinfang_requests_total", "no job is named"),
        ("twinfang_requests_total{job='decode'}", "decode exports no"),
        ("twinfang_requests_total{job='routers'}", "job is one of"),
        ("twinfang_requests_total{job='router',code='x'}", "no label code"),
        ("twinfang_requests_total{job='router',outcome='fail'}", "outcome is one of"),
        ("sum by (cause) (twinfang_requests_total{job='router'})", "groups by"),
        ("up{job='router'} / on (cause) up{job='decode'}", "matches"),
        ("twinfang_requests_total{job='router'} / twinfang_places{job='router'}", "matches"),
    ],
)
def test_what_is_misspelt_is_found(exports, expr, problem):
    with pytest.raises((LookupError, ValueError), match=problem):
        result_labels(parse(expr), exports.labels_of)


def test_an_expression_made_defined_answers_where_it_is_quiet():
    text = defined(parse("max by (a) (x) > 0.1 * (1 - y) and z == 0"))
    assert re.sub(r"\s+", " ", text) == ("(max by (a) (x)) > bool (0.1 * (1 - y)) and (z) == bool (0)")
    assert isinstance(promql.parse(text), promql.BinaryExpr)


def test_jobs_and_labels_of_targets_are_those_that_the_document_asks_for():
    page = Path(ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for name in (*JOBS, *TARGET_LABELS, "pool"):
        assert f"`{name}`" in page
