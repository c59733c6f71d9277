"""Sums and histograms of the last minute."""

import pytest

from router.observe.window import WINDOW_S, WindowHistogram, WindowSum


def test_a_sum_forgets_what_is_older_than_the_window():
    total = WindowSum()
    total.add(1, 100.2)
    total.add(2, 100.9)
    total.add(4, 130.0)
    assert total.total(130.5) == 7
    assert total.total(100 + WINDOW_S - 0.1) == 7
    assert total.total(100 + WINDOW_S) == 4
    total.add(8, 100.0 + WINDOW_S)  # the same slot as the first ones
    assert total.total(100.0 + WINDOW_S) == 12
    assert total.total(1000.0) == 0


def test_a_histogram_counts_by_bucket_and_forgets():
    times = WindowHistogram()
    for seconds in [0.010] * 50 + [0.100] * 45 + [5.0] * 5:
        times.observe(seconds, 10.0)
    found = times.snapshot(10.5)
    assert found.percentile_ms(0.5) == pytest.approx(10, rel=0.27)
    assert found.percentile_ms(0.9) == pytest.approx(100, rel=0.27)
    assert found.percentile_ms(0.99) == pytest.approx(5000, rel=0.27)
    assert [count for _, count in found.histogram if count] == [50, 45, 5]
    assert [bound for bound, _ in found.histogram] == sorted(bound for bound, _ in found.histogram)
    assert times.snapshot(10.0 + WINDOW_S).percentile_ms(0.5) is None
    assert times.snapshot(10.0 + WINDOW_S).histogram == []


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_times_beyond_all_bounds_are_counted_at_the_last_one(seconds):
    times = WindowHistogram()
    times.observe(seconds, 0.0)
    assert times.snapshot(0.0).count == 1
