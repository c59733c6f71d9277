"""A reader that applies the journal's messages has the journal's content, also after a long absence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.memory.prefix_journal import MAX_CHANGES, MAX_KEYS, PrefixJournal, ReadCost, Tier
from wire.codec import MAX_MESSAGE_BYTES, encode
from wire.messages.prefixes import KEY_BYTES, PrefixNews, TierNews


class Asker:
    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.version: int | None = None

    def ask(self, journal: PrefixJournal) -> PrefixNews:
        news = journal.news(self.version)
        self.keys = set(news.added) if news.is_whole else self.keys - set(news.removed) | set(news.added)
        self.version = news.version
        return news


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans())))
def test_two_askers_at_any_times_have_the_same_keys(steps):
    journal, keys, askers = PrefixJournal(), set(), (Asker(), Asker())
    for number, *asks in steps:
        key = bytes([number]) * KEY_BYTES
        if key in keys:
            keys.remove(key)
            journal.remove(key)
        else:
            keys.add(key)
            journal.add(key)
        for asker, does_ask in zip(askers, asks, strict=True):
            if does_ask:
                asker.ask(journal)
                assert asker.keys == keys
    for asker in askers:
        asker.ask(journal)
        assert asker.keys == keys
        assert asker.ask(journal) == PrefixNews(journal.news(None).version, False)


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES)


def test_only_what_changed_is_told_and_what_came_and_went_is_not_added():
    journal, asker = PrefixJournal(), Asker()
    for number in range(100):
        journal.add(key_of(number))
    assert asker.ask(journal).is_whole
    journal.add(key_of(100))
    journal.remove(key_of(0))
    journal.add(key_of(101))
    journal.remove(key_of(101))
    news = asker.ask(journal)
    assert (news.is_whole, news.added) == (False, (key_of(100),))
    assert set(news.removed) == {key_of(0), key_of(101)}


def test_who_knew_another_process_is_told_everything():
    journal, asker = PrefixJournal(), Asker()
    journal.add(key_of(1))
    asker.ask(journal)
    restarted = PrefixJournal()
    restarted.add(key_of(7))
    assert asker.ask(restarted).is_whole
    assert asker.keys == {key_of(7)}


def test_the_log_of_changes_is_bounded():
    journal, asker = PrefixJournal(), Asker()
    asker.ask(journal)
    for number in range(MAX_CHANGES + 1):
        journal.add(key_of(number))
    assert asker.ask(journal).is_whole
    assert len(asker.keys) == MAX_CHANGES + 1


def test_a_message_is_bounded_and_has_the_newest():
    journal = PrefixJournal()
    for number in range(MAX_KEYS + 10):
        journal.add(key_of(number))
    news = journal.news(None)
    assert len(news.added) == MAX_KEYS
    assert news.added[-1] == key_of(MAX_KEYS + 9)
    assert len(encode(news)) < MAX_MESSAGE_BYTES


COST = {Tier.HOST: ReadCost(start=100.0, token=0.5)}


def test_a_key_is_told_with_the_fastest_tier_that_has_it():
    journal = PrefixJournal(COST)
    journal.add(key_of(1))
    journal.add(key_of(1), Tier.HOST)
    journal.add(key_of(2), Tier.HOST)
    whole = journal.news(None)
    assert (whole.added, whole.removed) == ((key_of(1),), ())
    assert whole.tiers == (TierNews("host", (key_of(2),), 100.0, 0.5),)
    journal.remove(key_of(1))
    journal.add(key_of(2))
    news = journal.news(whole.version)
    assert (news.added, news.removed) == ((key_of(2),), (key_of(1),)), (
        "readers of device memory alone are right"
    )
    assert news.tiers[0].added == (key_of(1),)
    journal.remove(key_of(2), Tier.HOST)
    assert journal.news(news.version).added == (), "the device still has it: nothing changed"
    journal.remove(key_of(1), Tier.HOST)
    assert journal.news(news.version).removed == (key_of(1),)


def test_a_server_without_host_memory_sends_what_it_always_sent():
    journal = PrefixJournal()
    journal.add(key_of(1))
    assert journal.news(None) == PrefixNews(journal.version, True, (key_of(1),))


def test_a_message_with_all_tiers_is_bounded_and_has_the_device_s_keys_first():
    journal = PrefixJournal(COST)
    for number in range(MAX_KEYS):
        journal.add(key_of(number), Tier.HOST)
    for number in range(10):
        journal.add(key_of(MAX_KEYS + number))
    news = journal.news(None)
    assert len(news.added) == 10
    assert news.tiers[0].added == tuple(map(key_of, range(10, MAX_KEYS)))
    assert len(encode(news)) < 20 * MAX_KEYS
    for number in range(MAX_CHANGES // 2):
        journal.add(key_of(number))
        journal.remove(key_of(number))
    changes = journal.news(news.version)
    assert not changes.is_whole
    assert len(encode(changes)) < 2 * 20 * MAX_CHANGES


def test_files_are_told_behind_host_memory_and_bounded_with_it():
    journal = PrefixJournal(COST)
    for number in range(MAX_KEYS):
        journal.add(key_of(number), Tier.FILES)
    journal.price(Tier.FILES, ReadCost(200.0, 2.0))
    for number in range(20):
        journal.add(key_of(MAX_KEYS + number), Tier.HOST)
    for number in range(10):
        journal.add(key_of(MAX_KEYS + number))
        journal.add(key_of(MAX_KEYS + number), Tier.FILES)
    news = journal.news(None)
    assert news.added == tuple(map(key_of, range(MAX_KEYS, MAX_KEYS + 10)))
    in_host, in_files = news.tiers
    assert (in_host.tier, in_host.added) == ("host", tuple(map(key_of, range(MAX_KEYS + 10, MAX_KEYS + 20))))
    assert (in_files.tier, in_files.start_cost, in_files.token_cost) == ("files", 200.0, 2.0)
    assert in_files.added == tuple(map(key_of, range(20, MAX_KEYS))), "the newest that there is room for"
    journal.remove(key_of(MAX_KEYS))
    journal.remove(key_of(MAX_KEYS), Tier.HOST)
    news = journal.news(news.version)
    assert (news.added, news.removed) == ((), (key_of(MAX_KEYS),)), "as the last release understands it"
    assert news.tiers[1].added == (key_of(MAX_KEYS),)


def test_another_cost_of_reading_is_told_when_it_differs_much():
    journal = PrefixJournal(COST)
    journal.price(Tier.FILES, ReadCost(200.0, 2.0))
    first = journal.news(None)
    journal.price(Tier.FILES, ReadCost(220.0, 1.9))
    assert journal.version == first.version
    journal.price(Tier.FILES, ReadCost(100.0, 2.0))
    news = journal.news(first.version)
    assert (news.is_whole, news.added, news.removed) == (False, (), ())
    assert news.tiers[1] == TierNews("files", (), 100.0, 2.0)
    journal.price(Tier.FILES, ReadCost(0.0, 2.0))
    journal.price(Tier.FILES, ReadCost(0.0, 2.0))
    assert journal.version == news.version + 1
