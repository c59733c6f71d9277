"""How a router estimates a server's load from the server's stats and from its own requests there."""

from __future__ import annotations

import pytest

from router.fleet.links.assignments import Assignments
from router.policies.policy import Load
from testing.router.scripted_servers import server_info, server_stats


def assignments(role: str, **info) -> Assignments:
    made = Assignments(lambda: 0.0)
    made.appeared(server_info(role, block_size=10, **info))
    return made


def test_own_prompts_count_at_once_and_until_they_are_computed():
    prefill = assignments("prefill")
    first, second = prefill.begin(100), prefill.begin(30)
    assert prefill.load() == Load(130, -130, 0)
    first.unload()
    first.unload()
    assert prefill.load().queued_tokens == 30
    second.failed()
    first.ended()
    assert prefill.load() == Load()
    assert prefill.num_requests == 0


def test_what_others_sent_is_what_is_reported_less_what_was_ours_then():
    prefill = assignments("prefill")
    ours = prefill.begin(100)
    stats = server_stats(queued_tokens=250, num_blocks=50, free_blocks=40)
    prefill.reported(stats, tokens_when_asked=prefill.num_tokens)
    assert prefill.load() == Load(250, 400, 500)
    prefill.begin(60)
    assert prefill.load() == Load(310, 340, 500)
    ours.ended()
    assert prefill.load() == Load(210, 440, 500)
    prefill.reported(server_stats(queued_tokens=5), tokens_when_asked=prefill.num_tokens)
    assert prefill.load().queued_tokens == 60, "some of ours is computed already"


def test_a_decode_server_s_load_is_the_room_that_requests_take():
    decode = assignments("decode")
    decode.reported(server_stats(queued_tokens=7, num_blocks=50, free_blocks=40), tokens_when_asked=0)
    decode.begin(120)
    assert decode.load() == Load(7, 280, 500)


def test_a_server_that_does_both_has_a_queue_of_prompts():
    both = assignments("both")
    both.begin(120)
    assert both.load().queued_tokens == 120


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_that_says_nothing_for_long_opens_the_breaker_until_it_does():
    clock = Clock()
    decode = Assignments(clock)

    def states_without_an_answer(*times):
        for clock.now in times:
            decode.not_told()
            yield decode.breaker.state

    clock.now = 100.0
    decode.appeared(server_info("decode"))
    assert set(states_without_an_answer(100.0, 110.0, 130.0)) == {"closed"}, "it appeared not long ago"
    decode.reported(server_stats(), tokens_when_asked=0)
    assert set(states_without_an_answer(140.0, 160.0)) == {"closed"}
    assert set(states_without_an_answer(161.0, 169.0, 177.0)) == {"open"}
    clock.now = 188.0
    decode.reported(server_stats(), tokens_when_asked=0)
    assert decode.breaker.state == "half_open"
    decode.begin(10).progressed()
    assert decode.breaker.state == "closed"


@pytest.mark.parametrize(("incarnation", "state"), [("another", "closed"), ("prefill-1", "open")])
def test_a_server_that_appears_again_has_no_figures_and_another_life_no_failures(incarnation, state):
    prefill = assignments("prefill")
    prefill.reported(server_stats(queued_tokens=9), tokens_when_asked=0)
    assert prefill.has_stats
    for _ in range(10):
        prefill.begin(1).failed()
    assert prefill.breaker.state == "open"
    prefill.appeared(server_info("prefill", incarnation=incarnation))
    assert prefill.breaker.state == state
    assert not prefill.has_stats
    assert prefill.load() == Load()
