"""What buckets tell, and what pages tell of them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from twinfang.autoscale import histogram
from twinfang.autoscale.histogram import added
from twinfang.autoscale.metrics_page import Page, PageChange
from twinfang.autoscale.page_window import PageWindow

BOUNDS = (0.1, 0.5, 1.0, 5.0)
VALUES = st.lists(st.floats(0, 5), max_size=30)


class Process:
    """Whose page changes as it counts."""

    def __init__(self, started=1000.0):
        self.registry = CollectorRegistry()
        self.waits = Histogram("waits_seconds", "", ["kind"], buckets=BOUNDS, registry=self.registry)
        self.steps = Counter("steps", "", ["kind"], registry=self.registry)
        self.running = Gauge("running", "", registry=self.registry)
        Gauge("process_start_time_seconds", "", registry=self.registry).set(started)
        for kind in ("a", "b"):
            self.waits.labels(kind)
            self.steps.labels(kind)

    def page(self, at_s=0.0, address="one"):
        return Page.parse(address, at_s, generate_latest(self.registry).decode())


def seen(values):
    process = Process()
    before = process.page()
    for value in values:
        process.waits.labels("a").observe(value)
    return PageChange(before, process.page(1.0)).histogram("waits_seconds")


@given(VALUES)
def test_counts_and_mean_are_those_of_the_values(values):
    found = seen(values)
    assert found.count == len(values)
    assert found.mean == pytest.approx(sum(values) / len(values) if values else 0.0)
    weighted = found.weighted()
    assert sum(share for _, share in weighted) == pytest.approx(1.0 if values else 0.0)
    if found.mean:
        assert sum(value * share for value, share in weighted) == pytest.approx(found.mean)


@given(VALUES, st.floats(0.01, 1), st.sampled_from(BOUNDS))
def test_shares_are_right_to_a_bucket(values, share, limit):
    assume(values)
    found = seen(values)
    assert found.share_above(limit) == pytest.approx(sum(value > limit for value in values) / len(values))
    quantile = found.quantile(share)
    exact = sorted(values)[max(0, -int(-share * len(values)) - 1)]
    lows = [low for low in (0.0, *BOUNDS) if low <= exact]
    assert quantile >= (lows[-1] if exact not in BOUNDS else lows[-2]) - 1e-9
    assert found.quantile(share) <= found.quantile(1.0)


def test_nothing_seen_is_nothing():
    empty = seen([])
    assert (empty.mean, empty.quantile(0.9), empty.share_above(1), empty.weighted()) == (0.0, 0.0, 0.0, [])
    assert added([empty, histogram.Histogram()]).count == 0


def test_several_processes_and_labels_add_up():
    process = Process()
    before = process.page()
    for kind, value in (("a", 0.3), ("b", 0.7), ("b", 9.0)):
        process.waits.labels(kind).observe(value)
        process.steps.labels(kind).inc(2)
    change = PageChange(before, process.page(2.0))
    assert change.histogram("waits_seconds").count == 3
    assert change.histogram("waits_seconds", kind="b").mean == pytest.approx(4.85)
    assert (change.sum("steps_total"), change.sum("steps_total", kind="a"), change.seconds) == (6, 2, 2.0)
    assert added([change.histogram("waits_seconds")] * 2).count == 6


def test_a_window_keeps_what_is_old_enough_and_forgets_what_has_gone():
    process, other, window = Process(), Process(), PageWindow(10.0)
    for at_s in range(0, 40, 5):
        process.steps.labels("a").inc()
        process.running.set(at_s)
        pages = [process.page(float(at_s))]
        window.take(pages if at_s > 20 else [*pages, other.page(float(at_s), "other")])
    (change,) = window.changes()
    assert (change.seconds, change.sum("steps_total"), window.mean("running")) == (10.0, 2, 30.0)


def test_a_process_that_has_restarted_says_nothing_until_it_was_read_twice():
    window = PageWindow(10.0)
    for at_s, started in ((0.0, 1.0), (5.0, 1.0), (10.0, 2.0)):
        process = Process(started)
        process.steps.labels("a").inc(100 - at_s)
        window.take([process.page(at_s)])
    assert not window.changes()
    window.take([Process(2.0).page(15.0)])
    assert [change.sum("steps_total") for change in window.changes()] == [0.0]


def test_what_is_no_page_is_refused():
    with pytest.raises(ValueError):
        Page.parse("one", 0.0, "<html>not metrics</html>")
