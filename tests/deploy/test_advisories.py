"""Known vulnerabilities of the packages that are pinned, and the list of those that are accepted."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.deploy.advisories import ACCEPTED, Accepted, NotChecked, complaints, read_accepted
from testing.deploy.image_hashes import CONSTRAINTS, HASHES, pins

TODAY = datetime.date(2027, 1, 15)
AUDIT = ("-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off")
UNREACHABLE = ("ServiceError", "ConnectionError", "ConnectionFailed", "ConnectTimeout")


def report(*vulns: dict[str, Any]) -> dict[str, Any]:
    """pip-audit's report of one package with findings and one without."""
    with_them = {"name": "leaky", "version": "1.0", "vulns": list(vulns)}
    return {"dependencies": [with_them, {"name": "sound", "version": "2.0", "vulns": []}], "fixes": []}


FINDING = {"id": "PYSEC-1", "aliases": ["GHSA-1"], "fix_versions": ["1.1"], "description": ""}


def accept(name: str = "GHSA-1", package: str = "leaky", until: datetime.date = TODAY) -> Accepted:
    return Accepted(name, package, "only our own files are read with it", until)


def test_a_finding_fails_until_somebody_accepts_it_by_any_of_its_names() -> None:
    (line,) = complaints(report(FINDING), [], TODAY)
    assert line == ("leaky 1.0: PYSEC-1, fixed in 1.1: update it, or accept it in accepted_advisories.toml")
    for name in ("PYSEC-1", "GHSA-1"):
        assert complaints(report(FINDING), [accept(name)], TODAY) == []
    assert len(complaints(report(FINDING), [accept(package="sound")], TODAY)) == 2


def test_an_acceptance_ends_with_its_date_with_its_finding_and_within_180_days() -> None:
    tomorrow = TODAY + datetime.timedelta(days=1)
    assert complaints(report(FINDING), [accept()], tomorrow) == [
        "leaky 1.0: PYSEC-1 was accepted until 2027-01-15: decide again"
    ]
    assert complaints(report(), [accept()], TODAY) == ["leaky: GHSA-1 is accepted and not found any more"]
    late = accept(until=TODAY + datetime.timedelta(days=181))
    assert complaints(report(FINDING), [late], TODAY) == [
        "leaky: GHSA-1 is accepted for too long: 2027-07-14 at most"
    ]


def test_a_package_that_was_not_audited_is_no_success() -> None:
    skipped = {"name": "unknown", "skip_reason": "Dependency not found"}
    with_one = report()
    with_one["dependencies"].append(skipped)
    assert complaints(with_one, [], TODAY) == ["unknown: not audited: Dependency not found"]
    with pytest.raises(NotChecked, match="no advisory service"):
        complaints({"dependencies": [skipped], "fixes": []}, [], TODAY)


@pytest.mark.parametrize("until", ["2027-01-31T00:00:00", '"2027-01-31"'])
def test_an_entry_needs_package_reason_and_date(tmp_path: Path, until: str) -> None:
    path = tmp_path / "accepted.toml"
    whole = '[[accepted]]\nid = "GHSA-1"\npackage = "leaky"\nreason = "none"\nuntil = {}\n'
    path.write_text(whole.format("2027-01-31"))
    assert [one.until for one in read_accepted(path)] == [datetime.date(2027, 1, 31)]
    path.write_text(whole.format(until))
    with pytest.raises(ValueError, match="wrong: until"):
        read_accepted(path)
    path.write_text('[[accepted]]\nid = "GHSA-1"\npackage = "leaky"\nreason = ""\n')
    with pytest.raises(ValueError, match="wrong: reason, until"):
        read_accepted(path)


def test_the_list_of_accepted_findings_can_be_read() -> None:
    known = pins(CONSTRAINTS.read_text(encoding="utf-8")) | pins(HASHES.read_text(encoding="utf-8"))
    assert {one.package for one in read_accepted(ACCEPTED)} <= known.keys()


def audit(packages: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    """What pip-audit says of each package."""
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
    command = [sys.executable, *AUDIT, "--requirement", str(requirements)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if any(word in ran.stderr for word in UNREACHABLE):
        pytest.skip(f"not checked: no advisory service: {ran.stderr.strip().splitlines()[-1][:200]}")
    assert ran.stdout, ran.stderr
    dependencies: list[dict[str, Any]] = json.loads(ran.stdout)["dependencies"]
    return dependencies


@pytest.mark.exhaustive
def test_no_pinned_package_has_a_known_vulnerability_that_nobody_accepted(tmp_path: Path) -> None:
    tested, in_images = (pins(file.read_text(encoding="utf-8")) for file in (CONSTRAINTS, HASHES))
    others = {name: version for name, version in in_images.items() if tested.get(name) != version}
    found = [*audit(tested, tmp_path), *audit(others, tmp_path)]
    try:
        lines = complaints({"dependencies": found}, read_accepted(ACCEPTED), datetime.date.today())
    except NotChecked as reason:
        pytest.skip(str(reason))
    assert lines == []
