"""The rules of an account, in simulated time."""

import calendar

import pytest

from router.access.key_limits import KeyLimits
from router.quota.account import Account, day_of, month_of
from router.quota.limit_store import Settlement

NOON = calendar.timegm((2026, 2, 28, 12, 0, 0))
HOUR_S = 3600.0


def settle(account, num_tokens, reserved, at_s=NOON):
    day = day_of(at_s)
    account.settle(Settlement("id", "key", num_tokens, day, month_of(day)), reserved, has_lapsed=False)


def admitted(account, limits, num_tokens, at_s):
    return account.admit(limits, num_tokens, at_s) is None


def test_a_minutes_worth_may_be_used_at_once_and_then_as_much_as_flows_off():
    account, limits = Account(), KeyLimits(requests_per_minute=30)
    assert [admitted(account, limits, 0, NOON) for _ in range(32)] == [True] * 30 + [False] * 2
    assert not admitted(account, limits, 0, NOON + 1.9)
    assert admitted(account, limits, 0, NOON + 2)
    assert not admitted(account, limits, 0, NOON + 2)
    much_later = NOON + HOUR_S
    assert [admitted(account, limits, 0, much_later) for _ in range(31)] == [True] * 30 + [False]


def test_tokens_that_were_reserved_and_not_used_are_free_at_once():
    account, limits = Account(), KeyLimits(tokens_per_minute=1000)
    assert admitted(account, limits, 900, NOON)
    assert account.admit(limits, 200, NOON) == "tokens_per_minute"
    settle(account, 100, 900)
    assert admitted(account, limits, 900, NOON)


def test_an_answer_longer_than_its_reservation_counts_in_full():
    account, limits = Account(), KeyLimits(tokens_per_minute=1000)
    assert admitted(account, limits, 500, NOON)
    settle(account, 2000, 500)
    assert not admitted(account, limits, 1, NOON + 59)
    assert admitted(account, limits, 1, NOON + 61)


@pytest.mark.parametrize(
    ("limit", "begins_again"),
    [
        ("tokens_per_day", calendar.timegm((2026, 3, 1, 0, 0, 0))),
        ("tokens_per_month", calendar.timegm((2026, 3, 1, 0, 0, 0))),
        ("tokens_total", None),
    ],
)
def test_a_budget_holds_until_its_period_ends(limit, begins_again):
    account, limits = Account(), KeyLimits(**{limit: 1000})
    assert admitted(account, limits, 600, NOON)
    assert account.admit(limits, 600, NOON) == limit, "what runs is reserved"
    settle(account, 700, 600)
    assert admitted(account, limits, 300, NOON)
    settle(account, 300, 300)
    assert account.admit(limits, 1, NOON + 11 * HOUR_S) == limit
    if begins_again is None:
        assert account.admit(limits, 1, NOON + 1e8) == limit
    else:
        assert account.admit(limits, 1, begins_again - 1) == limit
        assert admitted(account, limits, 1000, begins_again)


def test_tokens_go_on_the_account_of_the_day_on_which_the_request_was_let_in():
    account, limits = Account(), KeyLimits(tokens_per_day=1000)
    assert admitted(account, limits, 800, NOON)
    tomorrow = NOON + 24 * HOUR_S
    assert account.admit(limits, 800, tomorrow) == "tokens_per_day", "it still runs"
    settle(account, 800, 800)
    assert admitted(account, limits, 1000, tomorrow)
    assert account.used_total == 800


def test_a_refused_request_changes_nothing():
    account = Account()
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=100, tokens_total=100)
    assert account.admit(limits, 101, NOON) == "tokens_total"
    before = account.standing(NOON)
    assert account.admit(limits, 101, NOON) == "tokens_total"
    assert account.standing(NOON) == before
    assert admitted(account, limits, 100, NOON)


def test_a_clock_that_goes_back_gives_nothing():
    account, limits = Account(), KeyLimits(requests_per_minute=1)
    assert admitted(account, limits, 0, NOON)
    assert not admitted(account, limits, 0, NOON - HOUR_S)
    assert admitted(account, limits, 0, NOON + 60)
