"""A slow, large or broken grammar delays only its own request, and no other request's step."""

import json
import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher

from engine.grammar import grammars as grammars_module
from engine.grammar import lane as lane_module
from engine.grammar.follower import Asker, Follower
from engine.grammar.grammars import MAX_OWN_LANES, MAX_WAITING, Grammars
from engine.grammar.known_grammars import Known
from engine.grammar.lane import Lane
from engine.request import Request
from testing.engines.speculating import Ask, assert_nothing_is_owned, assert_same, greedy_asks, serve
from wire.errors import GrammarError, OverloadedError
from wire.messages.sampling_params import SamplingParams

EOS = frozenset([2, 4])
AMBIGUOUS = 'start: x\nx: x x | x x x | "a" | "aa" | "0" | "\\""'
"""The parser has to keep all the ways to read an answer, and their number grows with its square."""
BOMB = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": "^(a{1000}){1000}$"}))
"""The first mask takes a second and hundreds of megabytes."""
WORDS = LLMatcher.grammar_from_regex("([a-z]{1,5} ){3,9}")


def stingy(grammars, monkeypatch, **changes):
    """Smaller budgets, so that tests are soon done; the usual priority, since the machine may be busy."""
    limits = {"max_job_s": 0.2, "base_s": 0.2, "per_job_s": 0.002} | changes
    monkeypatch.setattr(grammars, "_own_settings", replace(grammars._own_settings, **limits))


@pytest.fixture
def grammars(bundled_model, monkeypatch):
    made = Grammars(bundled_model, 1024, sorted(EOS))
    stingy(made, monkeypatch)
    yield made
    made.close()


def opened(grammars, grammar, answer=()):
    follower = grammars.follow(grammar, answer)
    follower.opened.result(60)
    grammars.add(follower, str(follower.key))
    return follower, masks_of(grammars, follower)


def masks_of(grammars, *awaited):
    """The next masks, or errors, of all these."""
    came, news = threading.Event(), {}
    grammars.on_news(came.set)
    while True:
        for one in grammars.news([]):
            news[one.request_id] = one.error or np.frombuffer(one.masks, dtype=np.int32)
        if all(str(one.key) in news for one in awaited):
            found = [news[str(one.key)] for one in awaited]
            return found if len(awaited) > 1 else found[0]
        assert came.wait(60), "no masks come"
        came.clear()


def allowed(mask):
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits) if token not in EOS]


def follow_on(grammars, follower, mask, most):
    """Continues with an allowed token each time, until an error occurs; the number of tokens and the
    error."""
    for number in range(most):
        grammars.ask(follower, [allowed(mask)[number % len(allowed(mask))]], ())
        mask = masks_of(grammars, follower)
        if isinstance(mask, Exception):
            return number, mask
    return most, None


def test_rows_go_on_while_one_waits_for_its_grammar(engines, bundled_model, monkeypatch):
    """When the budget of that one is spent, it alone fails; the others' answers are what they would be."""
    engine = engines.get(bundled_model, "none", 0, None, 0)
    stingy(engine.grammars, monkeypatch)
    others = [Ask(ask.prompt, ask.params, seed=ask.seed) for ask in greedy_asks(3, seed=2)]
    expected = engines.plain(bundled_model, others)
    slow = Ask((60, 70), SamplingParams(max_tokens=400, temperature=1.0, grammar=AMBIGUOUS), seed=3, stop=EOS)
    steps_without_it = 0

    def count(answers):
        nonlocal steps_without_it
        active = [answer for answer in answers[1:] if answer.finish_reason is None]
        steps_without_it += bool(active) and answers[0].request.awaits_masks

    answers = serve(engine, [slow, *others], on_step=count)
    assert answers[0].finish_reason == "error"
    assert len(answers[0].tokens) > 20
    assert steps_without_it > 0
    assert_same(answers[1:], expected)
    assert_nothing_is_owned(engine)
    assert not engine._following


def test_a_slow_grammar_gets_a_process_of_its_own_and_fails_when_its_budget_is_spent(grammars):
    quick, _ = opened(grammars, WORDS)
    slow, mask = opened(grammars, AMBIGUOUS)
    shared = quick.lane
    assert slow.lane is shared  # its first masks are quick
    number, error = follow_on(grammars, slow, mask, 400)
    assert isinstance(error, GrammarError)
    assert "processor time" in error.message
    assert 20 < number < 400
    assert quick.lane is shared
    assert follow_on(grammars, quick, allowed_first(grammars, quick), 2) == (2, None)
    assert not grammars._own
    grammars.drop(slow)


def allowed_first(grammars, follower):
    grammars.ask(follower, [], ())
    return masks_of(grammars, follower)


def test_a_bomb_is_refused_before_the_first_token_and_at_once_the_next_time(grammars):
    quick, _ = opened(grammars, WORDS)
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"processor time|too many expressions|memory"):
            opened(grammars, BOMB)
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars_module, "Lane", lambda *args: made.append(args))
        assert isinstance(grammars.follow(BOMB).opened.exception(0), GrammarError)
    assert not made
    assert quick.lane.num_followers == 1


def test_memory_that_a_grammar_takes_is_bounded_and_comes_back(grammars, monkeypatch):
    stingy(grammars, monkeypatch, max_bytes=48 << 20, max_job_s=30.0, base_s=30.0)
    with pytest.raises(GrammarError, match="48 MB of memory"):
        opened(grammars, BOMB)
    assert not grammars._own


def test_what_was_followed_in_a_process_that_died_is_followed_on_in_another(grammars):
    follower, mask = opened(grammars, WORDS)
    first = allowed(mask)[5]
    grammars.ask(follower, [first], ())
    mask = masks_of(grammars, follower)
    dead = follower.lane
    os.kill(dead._process.pid, signal.SIGKILL)
    second = allowed(mask)[0]
    grammars.ask(follower, [second], ())
    after = masks_of(grammars, follower)
    dead.join()
    _, expected = opened(grammars, WORDS, [first, second])
    assert (after == expected).all()


def test_a_lane_without_followers_ends_and_the_next_grammar_makes_another(grammars, monkeypatch):
    monkeypatch.setattr(lane_module, "IDLE_S", 0.01)
    follower, _ = opened(grammars, WORDS)
    lane = follower.lane
    assert follow_on(grammars, follower, allowed_first(grammars, follower), 3) == (3, None)
    grammars.drop(follower)
    lane.join()
    assert not grammars._shared
    again, _ = opened(grammars, WORDS)
    assert again.lane is not lane


def test_answers_that_go_on_are_followed_before_grammars_that_come(grammars, monkeypatch):
    """Jobs of one batch: those that go on, and one that begins."""
    follower, _ = opened(grammars, WORDS)
    batches = []
    encode = lane_module.encode
    monkeypatch.setattr(lane_module, "encode", lambda jobs: batches.append(jobs.jobs) or encode(jobs))
    newcomers = [grammars.follow(f'start: "a{i}" | "b"') for i in range(12)]
    for _ in range(5):
        allowed_first(grammars, follower)
    for newcomer in newcomers:
        newcomer.opened.result(60)
    assert all(sum(job.grammar is not None for job in jobs) <= 1 for jobs in batches)
    assert {newcomer.lane for newcomer in newcomers} == {follower.lane}


def follow_slow(grammars, client):
    """Follows a grammar that is known to be slow."""
    asker = Asker(client, client)
    with grammars._lock:
        grammars._known.remember(Follower(0, AMBIGUOUS, [], asker=asker), Known(None, True))
    return grammars.follow(AMBIGUOUS, asker=asker)


def lanes_of(followers):
    return sum(follower.lane is not None for follower in followers)


def test_a_client_gets_half_of_the_slow_lanes_and_waiting_places_that_others_leave(grammars, monkeypatch):
    monkeypatch.setattr(Lane, "put", lambda self, job, used: None)  # none of them ever answers
    hostile = [follow_slow(grammars, "bob") for _ in range((MAX_OWN_LANES + MAX_WAITING) // 2)]
    assert not any(follower.opened.done() for follower in hostile)
    assert (lanes_of(hostile), len(grammars._waiting)) == (MAX_OWN_LANES // 2, MAX_WAITING // 2)
    refused = follow_slow(grammars, "bob").opened.exception(0)
    assert isinstance(refused, OverloadedError)
    assert f"the limit is {MAX_WAITING // 2}" in refused.message
    victim = [follow_slow(grammars, "alice") for _ in range(6)]
    assert (lanes_of(victim), len(grammars._waiting)) == (MAX_OWN_LANES // 4, MAX_WAITING // 2 + 2)
    grammars.drop(victim[0])
    assert lanes_of(victim[1:]) == MAX_OWN_LANES // 4
    for follower in hostile[:2]:
        grammars.drop(follower)
    assert (lanes_of(hostile[2:]), lanes_of(victim[1:])) == (6, 5), "the first went to who has fewer"


def test_lanes_of_many_clients_are_never_more_than_allowed(grammars, monkeypatch):
    monkeypatch.setattr(Lane, "put", lambda self, job, used: None)
    monkeypatch.setattr(Lane, "_run", lambda self: None)
    monkeypatch.setattr(grammars_module, "MAX_CLIENTS", 4)
    followers = [follow_slow(grammars, f"client {i % 20}") for i in range(200)]
    assert lanes_of(followers) == len(grammars._own) == MAX_OWN_LANES
    assert len(grammars._waiting) < MAX_WAITING
    for follower in followers:
        grammars.drop(follower)
    assert not grammars._own
    assert not grammars._waiting
    follow_slow(grammars, "one more")
    assert set(grammars._used) == {"one more"}


def test_a_client_s_grammar_is_begun_after_one_of_each_other_client(grammars):
    """The prober and the shared lane have one grammar after the other of many from bob."""
    order = []
    for i in range(40):
        follower = grammars.follow(f'start: "b{i}" | "c"', asker=Asker("bob"))
        follower.opened.add_done_callback(lambda _: order.append("bob"))
    alice = grammars.follow('start: "a" | "b"', asker=Asker("alice"))
    alice.opened.add_done_callback(lambda _: order.append("alice"))
    for follower in [*grammars._followers.values()]:
        follower.opened.result(60)
    assert order.index("alice") < 20
    assert len(order) == 41


@pytest.mark.exhaustive  # its lanes compute only while no other process does
def test_a_slow_grammar_is_begun_before_most_of_another_client_s(grammars):
    order = []
    slow = [LLMatcher.grammar_from_json_schema(json.dumps(schema(f"f{i}"))) for i in range(9)]
    for name, mine in (("bob", slow[:8]), ("alice", slow[8:])):
        for grammar in mine:
            follower = Follower(0, grammar, [], asker=Asker(name))
            with grammars._lock:
                grammars._known.remember(follower, Known(None, True))
            follower = grammars.follow(grammar, asker=Asker(name))
            follower.opened.add_done_callback(lambda _, name=name: order.append(name))
    for follower in [*grammars._followers.values()]:
        follower.opened.result(120)
    assert order.index("alice") <= 4, order


def schema(name):
    properties = {f"{name}_{i}": {"enum": [f"v{j}" for j in range(8)]} for i in range(100)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def test_what_is_known_of_a_grammar_is_known_for_its_salt_alone(grammars):
    def probed(salt):
        follower = grammars.follow(WORDS, asker=Asker("c", salt))
        is_probed = follower.lane is not None and follower.lane.settings.is_probing
        follower.opened.result(60)
        return is_probed

    assert [probed(salt) for salt in ("alice", "alice", "bob", "bob", "alice")] == [1, 0, 1, 0, 0]


def test_a_request_that_never_begins_leaves_no_follower(engines, bundled_model):
    engine = engines.get(bundled_model, "none", 0, None, 0)
    for tokens, grammar in (([5, 99_999], WORDS), ([5, 6], "nonsense")):
        request = Request("r", tokens, SamplingParams(max_tokens=4, grammar=grammar))
        with pytest.raises(Exception, match=r"vocabulary|compiled"):
            engine.add(request)
    assert not engine.grammars._followers
