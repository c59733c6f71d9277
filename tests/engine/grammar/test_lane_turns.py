"""Slow lanes take turns: the lane that has used the least time is next."""

import threading

from engine.grammar.lane_turns import LaneTurns, Used
from engine.grammar.patience import MOST_STEPS, Patience

TIMEOUT_S = 20


def test_who_has_used_least_is_next_and_one_runs_at_a_time():
    turns, order, running = LaneTurns(1, pause=0.0), [], []
    may_end = threading.Event()

    def take_turn(name, seconds):
        used = Used()
        used.seconds = seconds
        with turns.turn(used):
            running.append(name)
            assert running == [name]
            if name == "first":
                assert may_end.wait(TIMEOUT_S)
            order.append(name)
            running.remove(name)
        assert used.seconds > seconds

    threads = [threading.Thread(target=take_turn, args=("first", 9.0))]
    threads[0].start()
    while not running:
        pass
    for name, seconds in (("much", 5.0), ("little", 1.0), ("none", 0.0)):
        threads.append(threading.Thread(target=take_turn, args=(name, seconds)))
        threads[-1].start()
    while len(turns._waiting) < 3:
        pass
    may_end.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert order == ["first", "none", "little", "much"]


def test_a_pause_is_made_only_if_somebody_waits_and_ends_with_the_server():
    turns = LaneTurns(1, pause=1e9)
    for _ in range(2):
        with turns.turn(Used()):
            pass  # nobody waits: no pause
    began = threading.Event()

    def take_turn():
        with turns.turn(Used()):
            began.set()

    with turns.turn(Used()):
        waiting = threading.Thread(target=take_turn)
        waiting.start()
        while not turns._waiting:
            pass
        closing = threading.Timer(0.05, turns.close)
        closing.start()
    assert began.wait(TIMEOUT_S)
    waiting.join(TIMEOUT_S)


def test_steps_wait_ever_more_seldom_for_what_is_always_late():
    patience = Patience()

    def steps_to_next_wait():
        count = 1
        while not patience.may_wait():
            count += 1
        patience.waited(False)
        return count

    assert [steps_to_next_wait() for _ in range(7)] == [1, 2, 3, 5, 9, MOST_STEPS + 1, MOST_STEPS + 1]
    while not patience.may_wait():
        pass
    patience.waited(True)
    assert patience.may_wait(), "masks come in time again"
