"""A histogram written by one thread and read by others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from telemetry.histogram import Tally

BOUNDS = (0.25, 1.0, 2.5, 16384.0)
VALUES = st.sampled_from([0.0, 0.1, *BOUNDS, 3.0, 1e9])


class Showing:
    def __init__(self, tally):
        self._tally = tally

    def collect(self):
        family = HistogramMetricFamily("latency_seconds", "Some.")
        self._tally.put_into(family)
        yield family


def samples(registry):
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, float(sample.labels.get("le", 0))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.tuples(VALUES, st.integers(1, 4)), max_size=8))
def test_it_shows_what_the_clients_own_histogram_shows(observed):
    tally, theirs = Tally(BOUNDS), CollectorRegistry()
    histogram = Histogram("latency_seconds", "Some.", buckets=BOUNDS, registry=theirs)
    for value, times in observed:
        tally.add(value, times)
        for _ in range(times):
            histogram.observe(value)
    ours = CollectorRegistry()
    ours.register(Showing(tally))
    assert samples(ours) == pytest.approx(samples(theirs))
