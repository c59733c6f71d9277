"""Writes the table of router/admin/README.md: which role may make which call of the admin API.

    python -m testing.router.role_table

``tests/router/admin/test_roles.py`` makes each call with each role.
"""

from __future__ import annotations

from fastapi.routing import APIRoute

from router.access.role import ROLES, includes
from router.admin.api import MODULES
from router.admin.role_check import PREFIX, role_for
from testing.marked_section import replace_between
from testing.repository import ROOT

PAGE = ROOT / "router" / "admin" / "README.md"
BEGIN = "<!-- written by testing.router.role_table -->"
END = "<!-- end of what testing.router.role_table writes -->"


def calls() -> list[tuple[str, str]]:
    """Return method and path of all calls, those for the lowest role first."""
    routes = [route for module in MODULES for route in module.router.routes if isinstance(route, APIRoute)]
    found = [(method, PREFIX + route.path) for route in routes for method in route.methods]
    return sorted(found, key=lambda call: (ROLES.index(role_for(*call)), call[1], call[0]))


def table() -> str:
    lines = [f"| call | {' | '.join(f'`{role}`' for role in ROLES)} |", "|---|" + "---|" * len(ROLES)]
    for method, path in calls():
        may = ["yes" if includes(role, role_for(method, path)) else "" for role in ROLES]
        lines.append(f"| `{method} {path}` | {' | '.join(may)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    replace_between(PAGE, BEGIN, END, table())
