"""Compares what pip-audit reports with the findings that somebody has accepted, each until a date.

    .venv/bin/python -m pytest tests/deploy/test_advisories.py     # part of `make test-all`

deploy/accepted_advisories.toml is the list. An entry counts until its date, and fails when it is not needed.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.repository import ROOT

ACCEPTED = ROOT / "deploy" / "accepted_advisories.toml"
FIELDS = {"id": str, "package": str, "reason": str, "until": datetime.date}
LONGEST_DAYS = 180
"""An acceptance ends at most so long from now: by then there is a fixed version, or another reason."""


class NotChecked(Exception):
    """The advisory service said nothing about any package."""


@dataclass(frozen=True)
class Accepted:
    """A finding that stays, and why, until a date."""

    id: str
    package: str
    reason: str
    until: datetime.date


def read_accepted(path: Path) -> list[Accepted]:
    """Returns the entries of ``path``. Raises ValueError for one that lacks a field, or has a wrong one."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("accepted", [])
    for entry in entries:
        wrong = [name for name in FIELDS.keys() | entry.keys() if not _fits(name, entry.get(name))]
        if wrong:
            raise ValueError(
                f"{path.name}: {entry}: expected {', '.join(FIELDS)}; wrong: {', '.join(sorted(wrong))}"
            )
    return [Accepted(**entry) for entry in entries]


def complaints(report: dict[str, Any], accepted: Sequence[Accepted], today: datetime.date) -> list[str]:
    """Returns a line for each finding that nobody accepts today, each package that was not audited, and each
    entry that is not needed.

    ``report`` is pip-audit's JSON. Raises NotChecked if no package was audited.
    """
    packages = report["dependencies"]
    if all("skip_reason" in one for one in packages):
        raise NotChecked("not checked: no advisory service")
    lines = [f"{one['name']}: not audited: {one['skip_reason']}" for one in packages if "skip_reason" in one]
    needed = set()
    for package in packages:
        for finding in package.get("vulns", []):
            names = {finding["id"], *finding.get("aliases", [])}
            entry = next((e for e in accepted if e.id in names and e.package == package["name"]), None)
            needed.add(entry)
            lines += _lines(package, finding, entry, today)
    lines += [
        f"{one.package}: {one.id} is accepted and not found any more" for one in accepted if one not in needed
    ]
    latest = today + datetime.timedelta(days=LONGEST_DAYS)
    lines += [
        f"{one.package}: {one.id} is accepted for too long: {latest} at most"
        for one in accepted
        if one.until > latest
    ]
    return lines


def _lines(
    package: dict[str, Any], finding: dict[str, Any], entry: Accepted | None, today: datetime.date
) -> list[str]:
    what = f"{package['name']} {package['version']}: {finding['id']}"
    if entry is None:
        fixed = ", ".join(finding.get("fix_versions", [])) or "no version"
        return [f"{what}, fixed in {fixed}: update it, or accept it in {ACCEPTED.name}"]
    return [f"{what} was accepted until {entry.until}: decide again"] if today > entry.until else []


def _fits(name: str, value: object) -> bool:
    return name in FIELDS and type(value) is FIELDS[name] and value != ""
