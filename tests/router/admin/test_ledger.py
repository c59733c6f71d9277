"""The ledger of operators' changes."""

from hypothesis import given
from hypothesis import strategies as st

from router.admin.ledger import Entry, Ledger


def entry(name, value, stamp):
    return Entry(table="settings", key=(name,), values=(value,), stamp=stamp)


entries = st.lists(
    st.builds(entry, st.sampled_from("abc"), st.integers(), st.integers(0, 10**6)), max_size=20
)


@given(entries, st.randoms())
def test_the_order_in_which_changes_arrive_does_not_matter(given_entries, random):
    unique = list({one.stamp: one for one in given_entries}.values())
    shuffled = [*unique, *unique]
    random.shuffle(shuffled)
    one, other = Ledger(), Ledger()
    one.take(unique)
    for each in shuffled:
        other.take([each])
    assert sorted(one.entries(), key=str) == sorted(other.entries(), key=str)
    assert one.newer_than(other.stamps) == []


def test_a_stamp_is_above_all_known_ones_even_if_the_clock_was_set_back():
    now = [10**18]
    ledger = Ledger(3, lambda: now[0])
    first = ledger.stamp()
    now[0] -= 10**12
    assert ledger.stamp() > first
    ledger.take([entry("a", 1, 10**18)])
    assert ledger.stamp() > 10**18


def test_processes_never_give_the_same_stamp():
    ledgers = [Ledger(i, lambda: 10**18) for i in range(4)]
    stamps = [ledger.stamp() for ledger in ledgers for _ in range(50)]
    assert len(set(stamps)) == len(stamps)
