"""Events are read from bytes, wherever the stream of bytes is cut."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.kubernetes import watch_lines
from router.kubernetes.cluster_error import ClusterError
from router.kubernetes.watch_lines import WatchLines, status_error

EVENT = {"type": "ADDED", "object": {"metadata": {"name": "one\nline", "uid": "u"}}}


def fed(data, cuts=()):
    lines, events, start = WatchLines(), [], 0
    for end in (*sorted(cuts), len(data)):
        events += lines.feed(data[start:end])
        start = end
    return lines, events


@given(st.lists(st.integers(0, 400)), st.integers(0, 5))
def test_events_are_the_same_however_bytes_are_cut(cuts, num_events):
    data = b"".join(json.dumps(EVENT | {"object": {"n": i}}).encode() + b"\n" for i in range(num_events))
    lines, events = fed(data, [min(cut, len(data)) for cut in cuts])
    assert [event.object["n"] for event in events] == list(range(num_events))
    lines.ended()


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_breaks_nothing(data):
    with suppress(ClusterError):
        lines, events = fed(data)
        lines.ended()
        assert not events


@pytest.mark.parametrize("line", [b"[]", b'{"type": "ADDED"}', b'{"type": "NEW", "object": {}}', b"\xff"])
def test_a_line_that_is_no_event_is_garbage(line):
    with pytest.raises(ClusterError) as raised:
        WatchLines().feed(line + b"\n")
    assert raised.value.cause == "garbage"


def test_a_line_without_an_end_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(watch_lines, "MAX_LINE_BYTES", 1000)
    lines = WatchLines()
    for _ in range(10):
        lines.feed(b"x" * 100)
    with pytest.raises(ClusterError, match="longer than 1000 bytes"):
        lines.feed(b"x")


def test_an_answer_that_ends_in_a_line_is_broken():
    lines, _ = fed(json.dumps(EVENT).encode())
    with pytest.raises(ClusterError, match="in the midst of a line"):
        lines.ended()


@pytest.mark.parametrize(("code", "cause"), [(410, "gone"), (500, "refused"), ("?", "refused")])
def test_an_error_in_the_stream_is_raised_as_what_it_is(code, cause):
    told = {"type": "ERROR", "object": {"code": code, "message": "too old resource version"}}
    with pytest.raises(ClusterError, match="too old resource version") as raised:
        WatchLines().feed(json.dumps(told).encode() + b"\n")
    assert raised.value.cause == cause


def test_what_may_be_done_about_a_refusal_is_said():
    assert "Role and a RoleBinding" in status_error("GET pods", 403, {"message": "no"}).message
    assert "kubeconfig" in status_error("GET pods", 401, {}).message
