"""Alert rules: promtool's word on them, and a runbook for each."""

import re

import pytest
import yaml

from testing.deploy.observability import ROOT, RULE_TESTS, RULES_FILE, RUNBOOKS, alerts, panels, promtool

FLAG_TABLES = [*(ROOT / "twinfang/flags").glob("*.py"), ROOT / "twinfang/autoscale/flags.py"]
FLAGS = {flag for table in FLAG_TABLES for flag in re.findall(r'"(--[a-z-]+)"', table.read_text("utf-8"))}
SECTIONS = ["What it means", "What users notice", "How to look", "How to mend"]


def test_promtool_accepts_the_rules():
    promtool("check", "rules", RULES_FILE)


@pytest.mark.parametrize("file", RULE_TESTS, ids=lambda file: file.stem)
def test_alerts_fire_on_the_series_that_they_should_and_on_no_others(file):
    promtool("test", "rules", file)


def test_every_alert_fires_in_some_test_with_each_of_its_severities():
    fired = set()
    for file in RULE_TESTS:
        for test in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]:
            expected = [s["labels"] for case in test["promql_expr_test"] for s in case["exp_samples"]]
            for labels in expected:
                found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                fired.add((found.get("alertname"), found.get("severity")))
    assert {(alert.name, alert.labels["severity"]) for alert in alerts()} <= fired


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    names = {alert.name for alert in alerts()}
    assert {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"} == names
    for alert in alerts():
        assert alert.annotations["runbook_url"] == f"docs/runbooks/{alert.name}.md"


@pytest.mark.parametrize("name", sorted({alert.name for alert in alerts()}))
def test_a_runbook_says_what_it_means_what_users_notice_how_to_look_and_how_to_mend(name):
    page = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    assert re.findall(r"(?m)^## (.+)$", page) == SECTIONS
    for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", page):
        assert (RUNBOOKS / target).exists(), target


def test_panels_and_flags_that_runbooks_name_exist():
    titles = {panel["title"] for panel in panels()}
    for page in RUNBOOKS.glob("*.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert set(re.findall(r'"([^"]+)"', text)) <= titles, page
        assert set(re.findall(r"`(--[\w-]+)", text)) <= FLAGS, page


def test_the_index_of_runbooks_names_each_alert_with_its_severities():
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| \[(\w+)\]\((\w+)\.md\) \| ([a-z, ]+) \|", index)
    assert all(name == target for name, target, _ in rows)
    severities = {name: set(words.split(", ")) for name, _, words in rows}
    wanted: dict[str, set[str]] = {}
    for alert in alerts():
        wanted.setdefault(alert.name, set()).add(alert.labels["severity"])
    assert severities == wanted


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: f"{alert.name}-{alert.labels['severity']}")
def test_an_alert_has_what_a_reader_of_it_needs(alert):
    assert set(alert.annotations) == {"summary", "description", "runbook_url"}
    assert alert.labels["severity"] in ("critical", "warning")


def test_every_selector_begins_with_its_job_where_the_chart_puts_its_release():
    text = RULES_FILE.read_text(encoding="utf-8")
    for alert_text in re.findall(r"\{(?!\{)[^{}]*[=~][^{}]*\}", text):
        assert alert_text.startswith("{job"), alert_text
