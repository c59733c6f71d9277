"""The CPU cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twinfang.stack.cores import may_use_gpu, usable_cores

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", CORES),
        ("100000 100000", 1),
        ("150000 100000", min(2, CORES)),
        ("1000 100000", 1),
        ("6400000 100000", CORES),
        ("nonsense", CORES),
    ],
)
def test_a_containers_limit_counts_rounded_up(limit: str, expected: int, tmp_path: Path):
    (tmp_path / "cpu.max").write_text(limit)
    assert usable_cores(tmp_path / "cpu.max") == expected


def test_without_a_limit_the_affinity_mask_counts(tmp_path: Path):
    assert usable_cores(tmp_path / "cpu.max") == CORES


@pytest.mark.parametrize(
    ("device", "driver", "expected"),
    [("cpu", True, False), ("auto", True, True), ("auto", False, False), ("cuda", False, True)],
)
def test_a_gpu_may_be_used_where_a_driver_is_found_or_a_gpu_is_asked_for(tmp_path, device, driver, expected):
    file = tmp_path / "driver"
    if driver:
        file.touch()
    assert may_use_gpu(device, (tmp_path / "none", file)) == expected
