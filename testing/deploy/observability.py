"""The chart's alert rules and dashboard, and the tools that read them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.repository import ROOT

FILES = ROOT / "deploy" / "helm" / "twinfang" / "files"
RULES_FILE = FILES / "alerts.yaml"
DASHBOARD_FILE = FILES / "dashboard.json"
RULE_TESTS = sorted((ROOT / "tests" / "deploy" / "rules").glob("*.yaml"))
RUNBOOKS = ROOT / "docs" / "runbooks"

VARIABLES = {
    "namespace": ".*",
    "release": ".*",
    "prefill_pool": ".*",
    "decode_pool": ".*",
    "__rate_interval": "1m",
}
"""Values of the dashboard's variables: they select everything."""


@dataclass(frozen=True)
class Rule:
    name: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]
    is_alert: bool


@dataclass(frozen=True)
class Query:
    panel: str
    expr: str
    legend: str


def rules() -> list[Rule]:
    groups = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
    return [
        Rule(
            rule.get("alert") or rule["record"],
            rule["expr"],
            rule.get("labels", {}),
            rule.get("annotations", {}),
            is_alert="alert" in rule,
        )
        for group in groups
        for rule in group["rules"]
    ]


def alerts() -> list[Rule]:
    return [rule for rule in rules() if rule.is_alert]


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(DASHBOARD_FILE.read_text(encoding="utf-8"))
    return read


def panels() -> list[dict[str, Any]]:
    """Return the panels that show something, without rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["expr"], target["legendFormat"])


def find_tool(name: str) -> str:
    """Return the path of ``promtool`` or ``prometheus``; skip the test if it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} in PATH; on Debian: apt-get install prometheus")
    return found


def promtool(*arguments: str | Path) -> None:
    """Run promtool; fail with its output."""
    command = [find_tool("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
