"""Every flag and metric of ours on the page for those who come from other servers exists."""

from __future__ import annotations

import re

import pytest

from telemetry.families.vllm import ALIASES, USAGE
from testing.repository import DOCS
from twinfang.commands.table import COMMANDS

PAGE = (DOCS / "migrating.md").read_text(encoding="utf-8")
FLAGS = {flag.name for command in COMMANDS for group in command.groups for flag in group.flags}
METRICS = set(re.findall(r"(?m)^\| `(twinfang_\w+)`", (DOCS / "metrics.md").read_text(encoding="utf-8")))


def rows(title):
    """The cells of a section's table, without its head."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("title", ["Flags of vLLM", "Flags of SGLang"])
def test_each_flag_of_theirs_has_one_of_ours_or_none(title):
    for theirs, ours, difference in rows(title):
        assert re.findall(r"`(--[a-z-]+)`", theirs)
        named = set(re.findall(r"`(--[a-z-]+)`", ours))
        assert named <= FLAGS, theirs
        assert named or (ours == "none" and difference), theirs


def test_each_metric_of_theirs_has_one_of_ours_or_none():
    for theirs, ours, alias in rows("Metrics of vLLM"):
        named = set(re.findall(r"`(\w+)`", ours))
        assert named <= METRICS, theirs
        assert named or ours == "none"
        names = re.findall(r"`(\w+)`", theirs)
        made = {name for aliases in ALIASES.values() for name in aliases} | {*USAGE, "cache_config_info"}
        assert {name.removesuffix("_total") in made for name in names} == {alias.startswith("yes")}, theirs


def test_flags_in_the_text_exist():
    text = "\n".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    assert set(re.findall(r"`(--[a-z-]+)`", text)) <= FLAGS
