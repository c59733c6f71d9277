"""Clients share rows fairly: long answers or many choices of one client don't delay another's requests."""

from collections import Counter

import pytest

from engine.grammar.follower import Follower
from engine.request import Request
from engine.schedule.fair_share import PAUSE_STEPS, FairShares
from testing.engines.crowded import crowded_engine
from testing.engines.schedulers import compute, make_scheduler
from wire.messages.sampling_params import SamplingParams

SIZES = {"num_blocks": 200, "num_slots": 40, "max_model_len": 256}


def asked_by(client, number, *, num_tokens=4, max_tokens=100):
    params = SamplingParams(max_tokens=max_tokens)
    return Request(f"{client}{number}", list(range(num_tokens)), params, client=client)


def crowd(scheduler, client, count, **asked):
    requests = [asked_by(client, number, **asked) for number in range(count)]
    for request in requests:
        scheduler.add(request)
    return requests


def step(scheduler, count=1):
    for _ in range(count):
        compute(scheduler, scheduler.schedule())


def rows_of(scheduler):
    return dict(Counter(request.client for request in scheduler.running.values()))


def test_a_client_with_all_rows_gives_them_until_shares_are_equal():
    scheduler = make_scheduler(max_num_seqs=6, max_batch_tokens=64, **SIZES)
    crowd(scheduler, "hostile", 20)
    step(scheduler, 2)
    assert rows_of(scheduler) == {"hostile": 6}
    crowd(scheduler, "victim", 5)
    step(scheduler, PAUSE_STEPS + 1)
    assert rows_of(scheduler) == {"hostile": 5, "victim": 1}, "one row at a time"
    step(scheduler, 10 * PAUSE_STEPS)
    assert rows_of(scheduler) == {"hostile": 3, "victim": 3}
    assert scheduler.num_given_rows == 3, "rows went to and fro"
    assert scheduler.num_preemptions == 0, "no blocks were short"


def test_between_two_rows_that_are_given_there_is_a_pause():
    scheduler = make_scheduler(max_num_seqs=8, max_batch_tokens=64, **SIZES)
    crowd(scheduler, "hostile", 8)
    step(scheduler, 2)
    crowd(scheduler, "victim", 4)
    given = []
    for _ in range(5 * PAUSE_STEPS):
        step(scheduler)
        given.append(scheduler.num_given_rows)
    assert [given.count(count) for count in (1, 2, 3)] == [PAUSE_STEPS] * 3


def test_rows_that_all_wait_for_masks_are_given_without_a_pause():
    """No step may come for seconds: a pause that is counted in steps would not end."""
    scheduler = make_scheduler(max_num_seqs=8, max_batch_tokens=64, **SIZES)
    hostile = crowd(scheduler, "hostile", 8)
    step(scheduler, 2)
    for request in hostile:
        request.follower = Follower(0, "grammar", [])
    crowd(scheduler, "victim", 2, max_tokens=1)
    given = []
    for _ in range(4):
        scheduler.schedule()
        given.append(scheduler.num_given_rows)
        for request in scheduler.running.values():
            if request.client == "victim":
                request.follower = Follower(0, "grammar", [])
    assert given == [1, 1, 2, 2], "with the first one's steps there was a pause"


def test_the_youngest_gives_its_row_and_the_oldest_of_each_client_never_does():
    scheduler = make_scheduler(max_num_seqs=2, max_batch_tokens=64, **SIZES)
    hostile = crowd(scheduler, "hostile", 2)
    step(scheduler, 2)
    (victim,) = crowd(scheduler, "victim", 1)
    step(scheduler, 2 * PAUSE_STEPS)
    assert list(scheduler.running.values()) == [hostile[0], victim]
    crowd(scheduler, "third", 1)
    step(scheduler, 4 * PAUSE_STEPS)
    assert list(scheduler.running.values()) == [hostile[0], victim]


def test_a_free_row_goes_to_the_client_with_the_smallest_share():
    scheduler = make_scheduler(max_num_seqs=3, max_batch_tokens=64, **SIZES)
    (first, *_) = crowd(scheduler, "hostile", 9)
    step(scheduler, 2)
    (victim,) = crowd(scheduler, "victim", 1)
    scheduler.finish(first)
    step(scheduler)
    assert victim.request_id in scheduler.running
    assert scheduler.num_given_rows == 0


def test_one_client_alone_has_all_rows_first_come_first_served():
    scheduler = make_scheduler(max_num_seqs=3, max_batch_tokens=64, **SIZES)
    requests = crowd(scheduler, "", 9)
    step(scheduler, 20)
    assert list(scheduler.running.values()) == requests[:3]
    assert scheduler.num_given_rows == 0
    assert not scheduler.must_preempt


def test_where_blocks_run_out_the_largest_client_makes_room():
    scheduler = make_scheduler(
        max_num_seqs=4, max_batch_tokens=64, num_blocks=21, num_slots=9, max_model_len=64
    )
    hostile = crowd(scheduler, "hostile", 2, num_tokens=28, max_tokens=30)
    step(scheduler, 2)
    (victim,) = crowd(scheduler, "victim", 1, num_tokens=8, max_tokens=30)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert victim.request_id in scheduler.running, "the youngest had to go, though it has least"
    assert list(scheduler.preempted.values()) == [hostile[1]]
    assert hostile[0].request_id in scheduler.running


@pytest.mark.parametrize("wait", range(PAUSE_STEPS))
def test_a_request_whose_forks_begin_in_a_plan_gives_no_row_in_it(wait):
    """What leaves the pools is copied before forks are: the forks would start from memory that is gone."""
    scheduler = make_scheduler(max_num_seqs=2, max_batch_tokens=64, **SIZES)
    crowd(scheduler, "hostile", 1)
    step(scheduler, 1 + wait)
    source, fork = asked_by("hostile", 1), asked_by("hostile", 2)
    source.forks = [fork]
    scheduler.add(source)
    step(scheduler)
    crowd(scheduler, "victim", 1)
    begun, left = [], []
    while scheduler.num_given_rows == 0:
        plan = scheduler.schedule()
        begun += [name for one in plan.forks for name in one.stored]
        left += [swap.request_id for swap in plan.swap_out]
        assert begun == [fork.request_id], "the fork began when its source was computed"
        compute(scheduler, plan)
    assert left == [source.request_id]


def test_blocks_count_as_rows_do():
    """A client with one long request of two has as large a share as one with many rows."""
    long, short = asked_by("long", 0), [asked_by("short", number) for number in range(4)]
    long.memory.block_ids, short[0].memory.block_ids = list(range(50)), [60]
    shares = FairShares([long, *short], num_rows=8, num_blocks=100)
    assert shares.of("long") == shares.of("short") == 0.5
    assert shares.of("nobody", rows=1, blocks=2) == 0.125
    other = asked_by("other", 0)
    assert shares.giver_for(other, 1, [long, *short]) is short[3], "the only long one keeps its row"


def test_a_row_with_log_probabilities_counts_as_several():
    told = [asked_by("told", number) for number in range(2)]
    for request in told:
        request.params = SamplingParams(max_tokens=1, logprobs=20)
    plain = [asked_by("plain", number) for number in range(5)]
    shares = FairShares([*told, *plain], num_rows=64, num_blocks=100)
    assert shares.of("told") == 6 / 64
    assert shares.next_of([told[0], plain[0]]) is plain[0]
    assert shares.giver_for(asked_by("other", 0), 1, [*told, *plain]) is told[1]


def test_a_request_that_left_the_queue_gets_no_row():
    scheduler = make_scheduler(max_num_seqs=2, max_batch_tokens=64, **SIZES)
    crowd(scheduler, "hostile", 2)
    step(scheduler, 2)
    scheduler.launched(scheduler.schedule())
    (victim,) = crowd(scheduler, "victim", 1)
    scheduler.launched(scheduler.schedule())
    assert scheduler.must_preempt, "what is in flight has to land first"
    scheduler.finish(victim)
    assert not scheduler.must_preempt


@pytest.mark.parametrize(("mode", "k", "steps_ahead"), [("none", 0, 0), ("align", 1, 1), ("all", 3, 1)])
def test_answers_that_gave_their_rows_are_exact(bundled_model, mode, k, steps_ahead):
    """Monolithic and alone as the oracle; here two clients take rows from each other all the time."""

    def engine(num_seqs):
        return crowded_engine(bundled_model, num_seqs, mode=mode, k=k, steps_ahead=steps_ahead)

    def asked(client, number):
        prompt = [6 + (7 * number + i * (3 if client == "a" else 5)) % 140 for i in range(12)]
        return Request(
            f"{client}{number}", prompt, SamplingParams(max_tokens=40, temperature=0), client=client
        )

    def run(engine, *batches):
        requests = []
        for batch in batches:
            for request in batch:
                engine.add(request)
                requests.append(request)
            for _ in range(6):
                engine.step()
        while not engine.step().did_nothing:
            pass
        return {request.request_id: request.tokens for request in requests}

    expected = {}
    for client in "ab":
        for number in range(8):
            expected |= run(engine(1), [asked(client, number)])
    crowded = engine(5)
    batches = [[asked("a", number) for number in range(8)]]
    batches += [[asked("b", number)] for number in range(8)]
    assert run(crowded, *batches) == expected
    assert crowded.scheduler.num_given_rows > 0
    assert crowded._store.num_bytes == 0
