"""Lives that are drawn at random, and lives that hypothesis looks for."""

import os
import random
from collections import Counter
from typing import get_args

from hypothesis import HealthCheck, settings

from testing.lives.file_rules import FAULTS
from testing.lives.random_lives import KINDS, SESSIONS, TRANSFER_ENDS, LivesOfRequests
from wire.messages.sessions import SessionAction

NUM_TURNS = 250


def run_lives(num_lives, lives=LivesOfRequests, **members):
    """Runs ``num_lives`` lives of 250 turns each, then as many in which hypothesis chooses up to 50 rules.

    A life of turns has a bit of everything, but what fails can't be made smaller. Hypothesis finds small
    lives, but most of its lives are one-sided. Returns how often what has happened.
    """
    num_lives = int(os.environ.get("TWINFANG_EXAMPLES", num_lives))
    seen = Counter()
    name = "_".join(map(str, members.values()))
    machine = type(f"{lives.__name__}_{name}", (lives,), {**members, "seen": seen})
    for number in range(num_lives):
        try:
            live(machine(), random.Random(f"{name} {number}"))
        except Exception as error:
            error.add_note(f"in life {number} of {members}")
            raise
    case = machine.TestCase
    case.settings = settings(
        max_examples=num_lives,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
    return seen


def live(machine, luck):
    """Takes turns from a random start on, and checks everything after each of them."""
    machine.start(
        num_seqs_of_slots=luck.randint(1, 5),
        num_more_slots=luck.randint(0, 4),
        num_blocks=luck.randint(18, 30),
        more_budget=luck.randint(0, 16),
        max_num_seqs=luck.randint(2, 5),
        steps_ahead=luck.randint(0, 1),
        seed=luck.randrange(1 << 16),
        host=(luck.randint(4, 60), luck.randint(1, 3), luck.randint(1, 30)),
        speeds=(luck.choice((0.0, 0.0, 0.125, 0.5)), luck.choice((0.125, 0.5, 2.0)), luck.choice((0.0, 4.0))),
        segments=(luck.randint(1, 4), luck.randint(2, 8)),
    )
    for _ in range(NUM_TURNS):
        turn(machine, luck)
        machine.check_all()
        machine.seen["turns"] += 1
    machine.teardown()


def turn(machine, luck):
    """Lets something happen, most often a step."""
    if machine.has_files and machine.is_reading and luck.random() < 0.4:
        happen_to_a_read(machine, luck)
        return
    pick = luck.randrange(100)
    if pick < 12 and machine.has_files:
        machine.recall(luck.randrange(100))
    elif pick < 30:
        ask(machine, luck)
    elif pick < 75:
        machine.step(luck.randint(1, 3), luck.choice((0, 0, 1, 2, 20)), luck.choice((0.0, 0.0, 0.125, 1.0)))
    elif pick < 81 and machine.has_files:
        machine.files_fail(luck.randint(0, 3), luck.choice(FAULTS))
    elif pick < 83 and machine.has_files:
        machine.time_passes(8.0)
    elif pick < 84 and machine.has_files:
        machine.restart()
    elif pick < 87 and machine.has_files:
        machine.forget(luck.random() < 0.7, luck.random() < 0.7)
    elif pick < 90:
        machine.tend(luck.choice(SESSIONS), luck.choice(get_args(SessionAction)))
    elif pick < 95:
        machine.end_transfer(luck.randrange(100), luck.choice(TRANSFER_ENDS))
    elif pick < 98:
        machine.release(luck.randrange(100))
    elif pick < 99 and machine.steps_ahead == 0:
        machine.step_that_finds_damage(luck.randrange(100), 1)
    else:
        machine.cancel(luck.randrange(100))


def happen_to_a_read(machine, luck):
    pick = luck.randrange(4)
    if pick == 0:
        machine.overtake()
    elif pick == 1:
        machine.forget(on_device=False, in_host=True)
        machine.files_fail(luck.randint(0, 3), "fail")
    else:
        machine.files_fail(luck.randint(0, 3), luck.choice(FAULTS))


def ask(machine, luck):
    machine.add(
        kind=luck.choice(KINDS),
        again=luck.randint(-1, 5),
        family=luck.randrange(3),
        shared=luck.randint(0, 36),
        own=luck.randint(1, 16),
        max_tokens=luck.randint(1, 12),
        stops_after=luck.choice((0, 0, 1, 3)),
        breaks_after=luck.choice((0, 0, 0, 0, 4)),
        speculate=luck.random() < 0.75,
        salt=luck.choice(("", "", "x")),
        client=luck.choice("aab"),
        num_forks=luck.choice((0, 0, 0, 1, 3)),
        session=luck.choice(("", *SESSIONS)),
    )
