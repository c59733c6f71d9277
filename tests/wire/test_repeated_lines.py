"""Many lines of one kind become one line and a count."""

import logging
import threading

import pytest

from wire import repeated_lines
from wire.repeated_lines import RepeatedLines

log = logging.getLogger("test.repeated")


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(repeated_lines, "INTERVAL_S", 1000.0)  # a test tells when it is over
    made = RepeatedLines(log)
    yield made
    made.tell()
    made.tell()


def shown(caplog, level=logging.INFO):
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.levelno >= level]


def test_the_first_line_is_written_at_once_and_the_others_are_counted(lines, caplog):
    caplog.set_level(logging.DEBUG)
    for i in range(200):
        lines.write(logging.ERROR, "lost at a", "request %d: lost", i)
    lines.write(logging.INFO, "late", "request late")
    assert shown(caplog) == [(logging.ERROR, "request 0: lost"), (logging.INFO, "request late")]
    assert "request 199: lost" in [text for _, text in shown(caplog, logging.DEBUG)]
    lines.tell()
    (count,) = shown(caplog)[2:]
    assert count[0] == logging.ERROR
    assert count[1].startswith("lost at a: 199 more in the last ")


def test_while_more_follow_there_are_counts_alone_and_then_a_first_line_again(lines, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        lines.write(logging.WARNING, "k", "one")
        lines.write(logging.WARNING, "k", "one")
        lines.tell()
    assert [text.partition(" in ")[0] for _, text in shown(caplog)] == ["one", "k: 1 more", "k: 2 more"]
    lines.tell()  # nothing has followed
    lines.write(logging.WARNING, "k", "again")
    assert shown(caplog)[-1][1] == "again"


def test_kinds_are_bounded(lines, caplog, monkeypatch):
    monkeypatch.setattr(repeated_lines, "MAX_KINDS", 3)
    caplog.set_level(logging.INFO)
    for i in range(10):
        lines.write(logging.WARNING, f"k{i}", "line %d", i)
    lines.tell()
    assert [text.partition(" in ")[0] for _, text in shown(caplog)][-1] == "other kinds: 6 more"


def test_the_count_comes_by_itself(caplog, monkeypatch):
    monkeypatch.setattr(repeated_lines, "INTERVAL_S", 0.01)
    caplog.set_level(logging.INFO)
    told = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: told.set() if "more in" in record.getMessage() else None
    log.addHandler(handler)
    made = RepeatedLines(log)
    for _ in range(3):
        made.write(logging.WARNING, "k", "one")
    assert told.wait(30)
    log.removeHandler(handler)
