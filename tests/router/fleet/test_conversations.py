"""A kept state is found by the tokens that it covers, is used once, and is forgotten in time."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.conversations import Conversations
from wire.messages.handoff import Ticket


def ticket(num_tokens, ttl_s=10.0):
    return Ticket("r", 0, 0, "h:1", "i", num_tokens, (1,), 1, ttl_s)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_longest_beginning_is_taken_and_only_once():
    kept = Conversations(Clock())
    tokens = list(range(50))
    kept.remember(tokens[:11], "", ticket(10))
    kept.remember(tokens[:31], "", ticket(30))
    assert kept.take(tokens, "").num_tokens == 30
    assert kept.take(tokens, "").num_tokens == 10
    assert kept.take(tokens, "") is None


def test_a_state_of_the_whole_prompt_is_of_no_use():
    kept = Conversations(Clock())
    kept.remember(list(range(11)), "", ticket(10))
    assert kept.take(list(range(10)), "") is None
    assert kept.take(list(range(11)), "").num_tokens == 10


def test_other_tokens_or_another_salt_find_nothing():
    kept = Conversations(Clock())
    kept.remember(list(range(11)), "a", ticket(10))
    assert kept.take(list(range(20)), "b") is None
    assert kept.take([9, *range(1, 20)], "a") is None


def test_a_ticket_is_not_taken_after_its_time():
    clock = Clock()
    kept = Conversations(clock)
    kept.remember(list(range(11)), "", ticket(10, ttl_s=5.0))
    clock.now = 6.0
    assert kept.take(list(range(20)), "") is None
    assert len(kept) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=30), st.integers(0, 2))
def test_what_is_taken_always_covers_a_beginning_of_the_prompt(stored, family):
    kept = Conversations(Clock())
    for who, length in stored:
        kept.remember([who] * 13, "", ticket(length))
    lengths = {length for who, length in stored if who == family}
    taken = []
    while (found := kept.take([family] * 13, "")) is not None:
        taken.append(found.num_tokens)
    assert taken == sorted(lengths, reverse=True)
