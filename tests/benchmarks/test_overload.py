"""A few seconds of overload over stub workers: every answer is exact or a refusal, and nothing is left
behind."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.serving import overload


def test_what_is_not_answered_exactly_is_refused_and_all_is_idle_afterwards(tmp_path, monkeypatch):
    report = tmp_path / "overload.json"
    flags = ("--overload-s", "5", "--calm-s", "1", "--step-ms", "10", "--json", str(report))
    monkeypatch.setattr(sys, "argv", ["overload", *flags])
    monkeypatch.setattr(overload, "START_TIMEOUT_S", 60.0)
    assert overload.main() == 0  # it waits until nothing is queued, in flight or assigned
    phases = {phase["name"]: phase for phase in json.loads(report.read_text())["phases"]}
    assert all(phase["wrong"] == 0 for phase in phases.values())
    assert phases["overload"]["refused"] > phases["overload"]["answered"] > 0
    assert phases["overload"]["retry_after_s"]["min"] >= 1


@pytest.mark.parametrize(
    ("token_ids", "status", "is_wrong"),
    [((1, 2), 200, False), ((1, 3), 200, True), ((), 429, False), ((), 503, True), ((), 0, True)],
)
def test_neither_an_exact_answer_nor_a_refusal_is_wrong(token_ids, status, is_wrong):
    outcome = overload.Outcome(0.0, status=status, token_ids=token_ids, is_exact=token_ids == (1, 2))
    assert bool(overload.Phase("", 1.0, 1.0, outcomes=[outcome]).wrong) == is_wrong
