from collections import Counter
from itertools import pairwise

from engine.memory.reuse_rates import NUM_AGES, FamilyReuse, ReuseRates, age_bin


def learned(uses, waiting=()):
    """Rates of class 0 after uses at these ages, with starts of these ages that wait."""
    rates = ReuseRates([0, 0])
    for age in uses:
        rates.used(0, age)
    rates.refresh(10_000, lambda: Counter((0, age_bin(age)) for age in waiting))
    return rates.rates


def test_without_counts_a_rate_falls_with_age_as_in_lru():
    rates = ReuseRates([0]).rates[0]
    assert all(younger >= 0.95 * older for younger, older in pairwise(rates))
    assert rates[0] > 10 * rates[6] > 100 * rates[11]


def test_what_is_used_sooner_has_the_higher_rate():
    soon, late = learned([10] * 50)[0], learned([1000] * 50)[0]
    assert soon[0] > 5 * late[0]


def test_what_is_used_by_fewer_has_the_lower_rate():
    assert learned([10] * 50)[0][0] > 2 * learned([10] * 50, waiting=[500] * 1000)[0][0]


def test_what_waited_longer_than_others_ever_did_is_worth_little():
    rates = learned([10] * 200, waiting=[500] * 200)[0]
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
    rates.refresh(10_000, lambda: {(2, age_bin(500)): 100})
    assert rates.rates[1][0] > 0.8 * rates.rates[0][0]
    assert rates.rates[3][0] < 0.2 * rates.rates[1][0]


def test_starts_that_wait_say_nothing_about_later_ages():
    """Half of the starts are young and still wait: the others' uses at age 100 stay as likely."""
    alone, with_young = learned([100] * 100)[0], learned([100] * 100, waiting=[10] * 100)[0]
    assert abs(with_young[age_bin(50)] / alone[age_bin(50)] - 1) < 0.1
    waited_longer = learned([100] * 100, waiting=[500] * 100)[0]
    assert waited_longer[age_bin(50)] < 0.7 * alone[age_bin(50)]


def test_a_start_that_missed_its_only_use_has_no_rate_left():
    """A start of age 1 was not used by the next request, as all others were."""
    rates = learned([1] * 500)[0]
    assert rates[1] < 0.05 * rates[0]


def test_a_forgotten_start_counts_as_unused_up_to_its_age():
    all_used, some_forgotten = ReuseRates([0]), ReuseRates([0])
    for _ in range(100):
        all_used.used(0, 10)
        some_forgotten.used(0, 10)
        some_forgotten.forgotten(0, 500)
    for rates in (all_used, some_forgotten):
        rates.refresh(10_000, Counter)
    assert all_used.chances[0] > 0.95
    assert 0.5 < some_forgotten.chances[0] < 0.7


def test_a_family_whose_starts_are_used_more_often_has_a_higher_factor():
    families = FamilyReuse()
    for _ in range(50):
        for family in (b"chats", b"documents"):
            families.expect(family, 0, 0.5)
        families.used(b"chats", 0)
    assert families.factor(b"chats", 0) > 1.5
    assert families.factor(b"documents", 0) < 0.2
    assert families.factor(b"chats", 1) == families.factor(b"unknown", 0) == 1.0


def test_the_number_of_families_is_bounded():
    families = FamilyReuse()
    families.expect(b"first", 0, 1.0)
    for number in range(1000):
        families.expect(b"%d" % number, 0, 0.5)
    assert families.factor(b"first", 0) == 1.0


def test_ages_are_binned_by_their_digits():
    assert [age_bin(age) for age in (0, 1, 2, 3, 4, 1 << 40)] == [0, 1, 2, 2, 3, NUM_AGES - 1]
