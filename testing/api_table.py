"""Writes the tables of docs/api.md: each field of each endpoint works, or is refused with which error.

    python -m testing.api_table

``tests/end_to_end/clients/test_api_table.py`` sends each line of the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from testing.api_facts.chat import CHAT
from testing.api_facts.completions import COMPLETIONS
from testing.api_facts.fact import WORKS, Endpoint, Fact
from testing.api_facts.messages import COUNT, MESSAGES
from testing.api_facts.responses import RESPONSES
from testing.marked_section import replace_between
from testing.repository import DOCS

PAGE = DOCS / "api.md"
BEGIN, END = "<!-- written by testing.api_table -->", "<!-- end of what testing.api_table writes -->"
ENDPOINTS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT)
MAX_SHOWN = 64


def tables() -> str:
    return "\n\n".join(_table(endpoint) for endpoint in ENDPOINTS)


def _table(endpoint: Endpoint) -> str:
    lines = [
        f"### {endpoint.path}",
        "",
        f"| field | sent by `{endpoint.client}` | outcome |",
        "|---|---|---|",
        *(f"| {_name(fact)} | {_value(fact)} | {_outcome(fact)} |" for fact in endpoint.facts),
    ]
    return "\n".join(lines)


def _name(fact: Fact) -> str:
    field, colon, rest = fact.name.partition(":")
    return f"`{field}`{colon}{rest}"


def _value(fact: Fact) -> str:
    shown = json.dumps(fact.value, ensure_ascii=False).replace("|", "\\|")
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[: MAX_SHOWN - 1]}…"
    beside = " and ".join(f"`{name}`" for name in fact.beside)
    return f"`{shown}`" + (f" with {beside}" if beside else "")


def _outcome(fact: Fact) -> str:
    if fact.outcome == WORKS:
        return WORKS
    status, code = fact.outcome.split()
    return f"refused: {status} `{code}`"


def facts() -> Iterator[tuple[Endpoint, Fact]]:
    for endpoint in ENDPOINTS:
        for fact in endpoint.facts:
            yield endpoint, fact


if __name__ == "__main__":
    replace_between(PAGE, BEGIN, END, tables())
