"""Which request is next, and which request leaves a full queue."""

import random
from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.admission.fair_queue import FairQueue, QueuedRequest

MAX_TOKENS = 1000
CLIENTS = st.sampled_from(["a", "b", "c"])
TOKENS = st.integers(1, MAX_TOKENS)


def turn(client: str = "a", priority: int = 0, num_tokens: int = 10, num_places: int = 1) -> QueuedRequest:
    return QueuedRequest(client, priority, num_places, num_tokens)


def served(queue: FairQueue, count: int) -> list[QueuedRequest]:
    taken = []
    for _ in range(count):
        chosen = queue.next()
        assert chosen is not None
        queue.serve(chosen)
        taken.append(chosen)
    return taken


@settings(max_examples=40)
@given(st.lists(st.tuples(CLIENTS, st.integers(-2, 2), TOKENS)))
def test_a_lower_priority_goes_first_and_a_clients_own_turns_in_order(drawn):
    queue, turns = FairQueue(), [turn(*fields) for fields in drawn]
    for one in turns:
        queue.push(one)
    order = served(queue, len(turns))
    assert [one.priority for one in order] == sorted(one.priority for one in turns)
    for kind in {(one.client, one.priority) for one in turns}:
        assert [o for o in order if (o.client, o.priority) == kind] == [
            o for o in turns if (o.client, o.priority) == kind
        ]
    assert queue.next() is None
    assert len(queue) == queue.num_places == 0


@given(st.integers(0, 2**32), st.integers(2, 5))
@settings(max_examples=50)
def test_clients_that_all_wait_are_served_the_same_number_of_tokens(seed, num_clients):
    rng, queue, total = random.Random(seed), FairQueue(), Counter()
    clients = [f"client {i}" for i in range(num_clients)]
    for client in clients * 40:
        queue.push(turn(client, num_tokens=rng.choice((1, 10, MAX_TOKENS))))
    for _ in range(40):  # no client can have fewer left than none
        (chosen,) = served(queue, 1)
        num_answered = rng.choice((0, 1, MAX_TOKENS))
        queue.charge(chosen, num_answered)
        total[chosen.client] += chosen.num_tokens + num_answered
        counts = [total[client] for client in clients]
        assert max(counts) - min(counts) <= 2 * MAX_TOKENS


def test_long_prompts_of_one_client_do_not_hold_up_the_short_ones_of_another():
    queue = FairQueue()
    for _ in range(50):
        queue.push(turn("long", num_tokens=1000))
    for _ in range(50):
        queue.push(turn("short", num_tokens=10))
    assert sum(one.client == "short" for one in served(queue, 52)) == 50


def test_a_client_that_was_away_has_saved_up_nothing():
    queue = FairQueue()
    for _ in range(100):
        queue.push(turn("busy"))
    served(queue, 50)
    for _ in range(20):
        queue.push(turn("back"))
    assert Counter(one.client for one in served(queue, 40)) == {"busy": 20, "back": 20}


def test_answers_count_as_soon_as_they_are_known():
    queue = FairQueue()
    for _ in range(20):
        queue.push(turn("talker"))
        queue.push(turn("listener"))
    order = []
    for _ in range(20):
        (chosen,) = served(queue, 1)
        order.append(chosen.client)
        queue.charge(chosen, 90 if chosen.client == "talker" else 0)
    assert order.count("listener") > 8 * order.count("talker")


def test_nothing_is_left_of_clients_and_priorities_that_do_not_wait():
    queue = FairQueue()
    for priority in range(100):
        one = turn(f"client {priority}", priority)
        queue.push(one)
        queue.serve(one)
        queue.charge(one, 1000)
    assert not queue._levels


# --- a full queue ----------------------------------------------------------------------------------


def full_of(*turns: QueuedRequest) -> FairQueue:
    queue = FairQueue()
    for one in turns:
        queue.push(one)
    return queue


def test_a_client_that_fills_the_queue_makes_room_for_others_with_its_newest_turn():
    turns = [turn("greedy") for _ in range(4)]
    queue = full_of(*turns)
    assert queue.displaced_by("greedy", 0) is None
    assert queue.displaced_by("other", 0) is turns[-1]


def test_clients_that_have_as_much_displace_nobody():
    queue = full_of(turn("a"), turn("a"), turn("b"))
    assert queue.displaced_by("b", 0) is None
    assert queue.displaced_by("c", 0) is not None


def test_the_least_urgent_leaves_first():
    urgent, late = turn("a", -1), turn("a", 5)
    queue = full_of(urgent, late)
    assert queue.displaced_by("b", 6) is None
    assert queue.displaced_by("a", 0) is late
    queue.remove(late)
    assert queue.displaced_by("b", 0) is None


class AnyLife(RuleBasedStateMachine):
    """Compares the queue with a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.turns: list[QueuedRequest] = []
        self.running: list[QueuedRequest] = []

    @rule(client=CLIENTS, priority=st.integers(-1, 1), num_tokens=TOKENS, num_places=st.integers(1, 4))
    def push(self, client, priority, num_tokens, num_places):
        one = turn(client, priority, num_tokens, num_places)
        self.queue.push(one)
        self.turns.append(one)

    @precondition(lambda self: self.turns)
    @rule()
    def serve(self):
        one = self.queue.next()
        by_client = defaultdict(list)
        for other in self.turns:
            by_client[other.client, other.priority].append(other)
        assert one.priority == min(other.priority for other in self.turns)
        assert by_client[one.client, one.priority][0] is one
        self.queue.serve(one)
        self.turns.remove(one)
        self.running.append(one)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def leave(self, data):
        one = data.draw(st.sampled_from(self.turns))
        self.queue.remove(one)
        self.turns.remove(one)

    @precondition(lambda self: self.running)
    @rule(num_tokens=st.integers(0, 5000))
    def answer(self, num_tokens):
        self.queue.charge(self.running.pop(), num_tokens)

    @rule(client=CLIENTS, priority=st.integers(-1, 1))
    def overflow(self, client, priority):
        displaced = self.queue.displaced_by(client, priority)
        if displaced is not None:
            assert displaced in self.turns
            assert displaced.priority == max(other.priority for other in self.turns) >= priority
            mine = sum((o.client, o.priority) == (client, priority) for o in self.turns)
            theirs = sum((o.client, o.priority) == (displaced.client, displaced.priority) for o in self.turns)
            assert displaced.priority > priority or theirs > mine + 1

    @invariant()
    def counts(self):
        assert len(self.queue) == len(self.turns)
        assert self.queue.num_places == sum(one.num_places for one in self.turns)


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=25, stateful_step_count=40)
