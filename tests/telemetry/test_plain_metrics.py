"""Plain metrics are shown as prometheus_client shows its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from telemetry.plain_metrics import LabelledHistogram, PlainCount, PlainCounter, PlainGauge, PlainHistogram


def shown(registry: CollectorRegistry) -> list[str]:
    """Returns the lines of the exposition, without those of the times of creation."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_all_kinds_look_like_those_of_the_library():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count = PlainCount("a_count", "A.", registry=ours)
    counter = PlainCounter("b_count", "B.", ["code"], registry=ours)
    gauge = PlainGauge("c", "C.", registry=ours)
    histogram = PlainHistogram("d_seconds", "D.", buckets=(0.1, 1.0), registry=ours)
    labelled = LabelledHistogram("e_seconds", "E.", ["model"], buckets=(0.1, 1.0), registry=ours)
    count.inc(2)
    counter.labels("x").inc()
    counter.labels("x").inc()
    counter.labels("y")
    gauge.inc()
    gauge.inc(-3)
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
        labelled.labels("m").add(value)
    Counter("a_count", "A.", registry=theirs).inc(2)
    known = Counter("b_count", "B.", ["code"], registry=theirs)
    known.labels("x").inc(2)
    known.labels("y")
    Gauge("c", "C.", registry=theirs).inc(-2)
    whole = Histogram("d_seconds", "D.", buckets=(0.1, 1.0), registry=theirs)
    split = Histogram("e_seconds", "E.", ["model"], buckets=(0.1, 1.0), registry=theirs)
    for value in (0.05, 0.1, 0.5, 7.0):
        whole.observe(value)
        split.labels("m").observe(value)
    assert shown(ours) == shown(theirs)
