"""Policies by the names that flags use for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from router.policies.least_loaded import LeastLoaded
from router.policies.policy import Policy
from router.policies.prefix_affinity import PrefixAffinity
from router.policies.round_robin import RoundRobin
from router.policies.session_affinity import SessionAffinity

PolicyName = Literal["least_loaded", "prefix_affinity", "round_robin"]

POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "least_loaded": LeastLoaded,
    "prefix_affinity": PrefixAffinity,
    "round_robin": RoundRobin,
}


def make_policy(name: PolicyName, *, has_sessions: bool) -> Policy:
    """Create a policy. ``has_sessions``: requests may say which session they belong to."""
    policy = POLICIES[name]()
    return SessionAffinity(policy) if has_sessions else policy
