"""Phases of a start follow one another without a gap."""

from __future__ import annotations

import time

from telemetry.start_up import StartUp


def test_phases_add_up_to_what_has_passed():
    began_s = time.monotonic()
    start_up = StartUp(began_s - 2.0)
    for phase in ("imports", "weights", "pools"):
        start_up.ended(phase)
    before_s = time.monotonic() - began_s + 2.0
    start_up.ended("weights")
    after_s = time.monotonic() - began_s + 2.0
    assert list(start_up.seconds) == ["imports", "weights", "pools"]
    assert start_up.seconds["imports"] >= 2.0
    assert before_s - 1e-6 <= sum(start_up.seconds.values()) <= after_s + 1e-6


def test_a_process_began_before_its_first_line_ran():
    start_up = StartUp.of_process()
    start_up.ended("imports")
    assert 0.05 < start_up.seconds["imports"] < 3600.0


def test_the_line_tells_the_rate_of_the_weights():
    start_up = StartUp()
    start_up.seconds = {"imports": 1.5, "weights": 0.25}
    start_up.weight_bytes = 500_000_000
    assert str(start_up) == "1.75 s: imports 1.50, weights 0.25 (0.50 GB, 2.0 GB/s)"
