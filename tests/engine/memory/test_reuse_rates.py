from itertools import pairwise

from engine.memory.reuse_rates import NUM_AGES, ReuseRates, age_bin


def learned(uses, num_unused=0):
    """Rates of class 0 after uses at these ages."""
    rates = ReuseRates([0, 0])
    for age in uses:
        rates.used(0, age)
    for _ in range(num_unused):
        rates.ended(0)
    rates.refresh(10_000)
    return rates.rates


def test_without_counts_a_rate_falls_with_age_as_in_lru():
    first = ReuseRates([0]).rates[0][1:]
    assert all(younger >= older for younger, older in pairwise(first))


def test_what_is_used_sooner_has_the_higher_rate():
    soon, late = learned([10] * 50)[0], learned([1000] * 50)[0]
    assert soon[0] > 5 * late[0]


def test_what_is_used_by_fewer_has_the_lower_rate():
    assert learned([10] * 50)[0][0] > 2 * learned([10] * 50, num_unused=1000)[0][0]


def test_what_waited_longer_than_others_ever_did_is_worth_little():
    rates = learned([10] * 200, num_unused=200)[0]
    assert rates[age_bin(1000)] < 0.05 * rates[age_bin(9)]


def test_a_pause_before_the_use_is_waited_for():
    """After 500 requests the use is near: the rate rises until then."""
    rates = learned([600] * 200)[0]
    assert rates[age_bin(500)] > rates[0]


def test_a_class_without_counts_is_like_all_together():
    of_class, unknown = learned([10] * 100)
    assert abs(unknown[age_bin(9)] / of_class[age_bin(9)] - 1) < 0.2


def test_a_class_with_few_counts_is_like_its_group():
    rates = ReuseRates([0, 0, 1, 1])
    for _ in range(100):
        rates.used(0, 10)
        rates.ended(2)
    rates.refresh(10_000)
    assert rates.rates[1][0] > 0.8 * rates.rates[0][0]
    assert rates.rates[3][0] < 0.2 * rates.rates[1][0]


def test_a_missed_start_counts_as_used():
    missed, ended = ReuseRates([0]), ReuseRates([0])
    for _ in range(100):
        for rates in (missed, ended):
            rates.used(0, 10)
            rates.ended(0)
        missed.used_after_end(0, 10)
    missed.refresh(10_000)
    ended.refresh(10_000)
    assert missed.rates[0][0] > ended.rates[0][0]


def test_ages_are_binned_by_their_digits():
    assert [age_bin(age) for age in (0, 1, 2, 3, 4, 1 << 40)] == [0, 1, 2, 2, 3, NUM_AGES - 1]
