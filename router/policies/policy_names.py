"""Policies by the names that flags have for them."""

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
    """``has_sessions``: a request may say which session it belongs to."""
    policy = POLICIES[name]()
    return SessionAffinity(policy) if has_sessions else policy
