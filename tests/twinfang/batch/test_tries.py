"""Whose fault a failure is, how long to wait, and when to give up; in simulated time."""

from __future__ import annotations

import email.utils
import time

import httpx2
import pytest

from twinfang.batch.outcome import Meaning, outcome_of, outcome_of_error
from twinfang.batch.pace import Pace, pause_s
from twinfang.batch.tries import Tries

URL = "http://host/v1"


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def outcome(status, **headers):
    return outcome_of(httpx2.Response(status, headers=headers), b'{"error": {"message": "why"}}')


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pace(clock):
    return Pace(clock, give_up_after_s=60.0)


def test_pauses_grow_to_half_a_minute_unless_the_endpoint_says_how_long():
    bases = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    for count, base_s in enumerate(bases, start=1):
        assert base_s <= pause_s(count) <= 1.25 * base_s
    assert pause_s(10_000) <= 37.5
    assert 7.0 <= pause_s(5, 7.0) <= 8.75
    assert 0.0 <= pause_s(5, 0.0) <= 0.125


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("0", 0.0), ("99999", 300.0), ("", None), ("soon", None), ("-1", None), ("²", None)],
)
def test_retry_after_is_read_and_bounded(text, seconds):
    headers = {"Retry-After": text.encode()}
    assert outcome_of(httpx2.Response(429, headers=headers), b"{}").retry_after_s == seconds


def test_retry_after_may_be_a_date():
    later = email.utils.formatdate(time.time() + 50, usegmt=True)
    assert 40 <= outcome(429, **{"Retry-After": later}).retry_after_s <= 50
    assert outcome(429, **{"Retry-After": "Sat, 01 Jan 2000 00:00:00 GMT"}).retry_after_s == 0


def test_each_answer_has_its_meaning():
    meanings = {status: outcome(status).meaning for status in (200, 400, 401, 403, 404, 422, 429, 500, 503)}
    done = dict.fromkeys((200, 400, 403, 404, 422), Meaning.DONE)
    assert meanings == done | {
        401: Meaning.KEY_REFUSED,
        429: Meaning.BUSY,
        500: Meaning.FAILED,
        503: Meaning.AWAY,
    }
    assert outcome_of(httpx2.Response(200), b"<html>").meaning is Meaning.FAILED
    refused, lost = (outcome_of_error(kind("x"), URL) for kind in (httpx2.ConnectError, httpx2.ReadError))
    assert (refused.meaning, refused.was_sent) == (Meaning.AWAY, False)
    assert (lost.meaning, lost.was_sent) == (Meaning.FAILED, True)


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_line_is_blamed_only_if_others_are_answered_meanwhile(pace, clock, status):
    tries = Tries(pace, max_retries=2)
    for _ in range(5):
        assert tries.failed(outcome(status)) == 0.0
        assert pace.wait_s > 0
        clock.now_s += 40.0
    assert tries.are_many
    pauses = []
    for _ in range(3):
        pace.answered()
        pauses.append(tries.failed(outcome(status)))
        assert pace.wait_s == 0
    assert pauses[-1] is None
    assert all(pauses[:-1])


def test_a_busy_endpoint_makes_one_line_wait_and_blames_none(pace):
    tries = Tries(pace, max_retries=0)
    for _ in range(20):
        pace.answered()
        assert tries.failed(outcome(429, **{"Retry-After": "3"})) >= 3.0
        assert pace.wait_s == 0
    assert not tries.are_many


def test_lines_that_fail_together_are_one_failure_of_the_endpoint(pace):
    for _ in range(64):
        pace.away(None)
    assert 0.5 <= pace.wait_s <= 0.625


def test_an_endpoint_is_given_up_only_after_refusals_without_an_answer(pace, clock):
    clock.now_s += 1000.0  # answers that take long are no refusals
    assert not pace.is_given_up
    pace.refused()
    clock.now_s += 59.0
    assert not pace.is_given_up
    clock.now_s += 2.0
    assert pace.is_given_up
    pace.answered()
    assert not pace.is_given_up
