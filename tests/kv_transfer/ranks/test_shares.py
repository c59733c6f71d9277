"""What all ranks' files have, and when a job has ended on all of them."""

from kv_transfer.files.names import STATE, NameChanges, block_name, state_name
from kv_transfer.ranks.shares import JobEnds, Shares

BLOCK_A, BLOCK_B, STATE_B = block_name(b"a", 1), block_name(b"ab", 1), state_name(b"ab", 1)
START = (STATE_B, BLOCK_B, BLOCK_A)


def test_a_start_counts_only_when_every_rank_has_all_of_it():
    shares = Shares(3, STATE)
    for rank in (2, 0):
        shares.update(rank, START, ())
        assert not shares.are_whole(START)
        assert shares.num_incomplete == 1
    shares.update(1, (STATE_B, BLOCK_B), ())
    assert (shares.is_whole(STATE_B), shares.is_whole(BLOCK_A)) == (True, False)
    assert not shares.are_whole(START)
    shares.update(1, (BLOCK_A,), ())
    assert shares.are_whole(START)
    assert shares.num_incomplete == 0
    shares.update(2, (), (BLOCK_A, STATE_B))
    assert not shares.are_whole(START)
    assert shares.num_incomplete == 1
    for rank in range(3):
        shares.update(rank, (), START)
    assert (shares.num_incomplete, shares._holders) == (0, {})


def test_shares_of_different_writes_do_not_make_a_start():
    shares = Shares(2, STATE)
    shares.update(0, START, ())
    shares.update(1, (state_name(b"ab", 2), block_name(b"ab", 2), block_name(b"a", 2)), ())
    assert not shares.are_whole(START)
    assert shares.num_incomplete == 2


def test_nothing_is_whole_that_nobody_has():
    assert not Shares(2, STATE).are_whole(())
    assert not Shares(2, STATE).is_whole(BLOCK_A)


def test_a_job_has_ended_when_it_has_ended_on_all_ranks():
    ends = JobEnds(3)
    assert [ends.note(7, True), ends.note(8, True), ends.note(7, True)] == [None, None, None]
    assert ends.note(7, True) is True
    assert [ends.note(8, False), ends.note(8, True)] == [None, False]
    assert ends._ended == {}


def test_what_came_and_went_before_anybody_asked_is_not_told():
    changes = NameChanges()
    changes.got(BLOCK_A)
    changes.got(BLOCK_B)
    changes.lost(BLOCK_A)
    assert changes.take() == ((BLOCK_B,), ())
    changes.lost(BLOCK_B)
    assert changes.take() == ((), (BLOCK_B,))
    assert changes.take() == ((), ())
