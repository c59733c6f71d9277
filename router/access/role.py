"""Roles: what somebody may do through the admin API. A higher role includes the lower ones."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["view", "operate", "configure"]
"""``view``: see servers, requests, figures and metrics. ``operate``: end requests, drain servers and use them
again. ``configure``: change settings, add and remove servers."""

ROLES: tuple[Role, ...] = get_args(Role)
"""From the lowest to the highest."""


def includes(role: Role | None, needed: Role) -> bool:
    """Return whether ``role`` may do what needs the role ``needed``."""
    return role is not None and ROLES.index(role) >= ROLES.index(needed)


def highest(names: set[str]) -> Role | None:
    """Return the highest role among ``names``. Names of no role are ignored."""
    return next((role for role in reversed(ROLES) if role in names), None)
