"""Half a minute of the soak test: random faults, no wrong answer and no leak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.soak.lineups import TIERS
from benchmarks.soak.report import figures, section
from benchmarks.soak.run import Settings, soak

SETTINGS = Settings(seconds=30.0, min_faults=6, seed=5, concurrency=6, rest_s=0.3, quiet_s=5.0)
"""Fewer clients than on the command line: other tests run beside this one."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [30.0, pytest.param(120.0, marks=pytest.mark.exhaustive)])
def test_answers_are_right_and_everything_is_given_back_whatever_fails(seconds, tmp_path):
    result = soak(replace(SETTINGS, seconds=seconds), tmp_path)
    report = figures(result, {"processor": "", "cores": 0, "load_average": 0.0})
    print(section(report))
    assert result.is_good, report
    assert report["right"] > 50
    assert sum(report["faults"].values()) >= SETTINGS.min_faults
    assert sum(report["retries"].values()) > 0, "no fault struck a request"


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_answers_are_right_while_tiers_move_prompts_and_their_files_are_damaged(tmp_path):
    """Host memory and files behind a small device. Some of the counts are lost with each killed server."""
    try:
        result = soak(replace(SETTINGS, lineup=TIERS), tmp_path)
    except PermissionError as error:
        pytest.skip(f"this user may not mount a small disk: {error}")
    report = figures(result, {"processor": "", "cores": 0, "load_average": 0.0})
    print(section(report))
    assert result.is_good, report
    assert report["right"] > 50
    assert sum(report["faults"].values()) >= SETTINGS.min_faults
    for name in ("host_cache_demoted", "host_cache_promoted", "file_cache_written", "file_cache_read"):
        assert result.tiers[f"{name}_prefixes_total"] > 0, result.tiers
