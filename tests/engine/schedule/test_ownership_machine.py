"""All memory has exactly one owner, whatever requests do (:mod:`testing.lives.lives`)."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.schedule.purges import Purges
from testing.lives.file_rules import BEHIND_NOTHING, KNOWN_MEANWHILE
from testing.lives.lives import NUM_TURNS, run_lives
from testing.lives.random_lives import LivesOfRequests
from wire.messages.purge import PurgePrefixes

HAPPENS = (
    *("asked of files", "waits", "read done", "write done", "write failed", "segment dropped"),
    *("restart", "promoted"),
)
"""What random lives with files are about."""


@pytest.mark.parametrize("num_positions", [1, 2, 4])
@pytest.mark.parametrize(
    ("mode", "policy"), [("none", "lru"), ("align", "lru"), ("all", "lru"), ("all", "value")]
)
def test_random_lives_keep_all_memory_owned_once(mode, policy, num_positions):
    """Twelve times six lives of 250 turns."""
    run_lives(6, mode=mode, policy=policy, num_positions=num_positions)


@pytest.mark.parametrize("num_positions", [1, 4])
@pytest.mark.parametrize(
    "members",
    [
        {"has_state": False, "mode": "none"},
        {"has_state": False, "mode": "all"},
        {"has_kv": False, "mode": "none"},
        {"has_kv": False, "mode": "align"},
        {"has_kv": False, "mode": "all"},
        {"has_kv": False, "mode": "all", "policy": "value"},
    ],
    ids=lambda members: " ".join(f"{name} {value}" for name, value in members.items()),
)
def test_random_lives_of_a_model_without_states_or_without_kv(members, num_positions):
    run_lives(4, num_positions=num_positions, **members)


TIERS = [
    {"mode": "align", "num_positions": 1},
    {"mode": "align", "policy": "value", "num_positions": 4},
    {"mode": "all", "num_positions": 2},
    {"mode": "all", "policy": "value", "num_positions": 4},
    {"mode": "all", "has_kv": False},
    {"mode": "all", "has_state": False},
]


@pytest.mark.parametrize(
    "members", TIERS, ids=lambda members: " ".join(f"{name} {value}" for name, value in members.items())
)
def test_random_lives_with_prefixes_in_host_memory_and_in_files(members):
    """Six times 24 lives of 250 turns: 36,000 looks at everything, after each event."""
    seen = run_lives(24, has_tier=True, has_files=True, **members)
    assert seen["turns"] == 24 * NUM_TURNS
    rare = BEHIND_NOTHING if members.get("has_kv", True) else KNOWN_MEANWHILE
    assert all(seen[name] for name in (*HAPPENS, rare)), seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_files", [False, True])
@pytest.mark.parametrize("num_positions", [1, 2, 4])
@pytest.mark.parametrize(("mode", "policy"), [("align", "lru"), ("all", "lru"), ("all", "value")])
@pytest.mark.parametrize(("has_kv", "has_state"), [(True, True), (False, True), (True, False)])
def test_more_random_lives_with_prefixes_on_several_tiers(
    mode, policy, num_positions, has_kv, has_state, has_files
):
    run_lives(
        40,
        has_tier=True,
        has_files=has_files,
        mode=mode,
        policy=policy if has_state else "lru",
        num_positions=num_positions,
        has_kv=has_kv,
        has_state=has_state,
    )


class PurgedLives(LivesOfRequests):
    """Now and then, all cached prompts of one owner are deleted, or all."""

    @rule(owner=st.sampled_from(["", "x", None]))
    def purge(self, owner):
        wanted, purges = PurgePrefixes(owner), Purges(self.scheduler, {})
        purges.purge(wanted)
        assert purges.purge(wanted) == 0
        if not purges.under_way(wanted):
            cache = self.scheduler.owned.cache
            assert not [node for node in cache._nodes.values() if wanted.covers(node.salt)]
            assert not [block for block in cache.tier._blocks.values() if wanted.covers(block.salt)]


@pytest.mark.parametrize(
    "members",
    [
        {"mode": "all", "policy": "value", "num_positions": 4},
        {"mode": "all", "has_kv": False},
        {"mode": "all", "has_state": False},
    ],
    ids=lambda members: " ".join(f"{name} {value}" for name, value in members.items()),
)
def test_random_lives_in_which_prompts_are_purged(members):
    run_lives(6, PurgedLives, has_tier=True, **members)
