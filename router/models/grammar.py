"""Builds grammars in llguidance's form. Decode servers make answers follow them.

Before a request is dispatched, :mod:`router.models.grammar_checker` finds errors in its grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

WHITESPACE = r"\x20|\n[\x20\t]{0,20}"
"""White space between the parts of a JSON text. If there were no limit, a small model might write blanks
without end."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def with_options(schema: dict[str, Any]) -> str:
    """Return a JSON schema as text, with options that say how its JSON is written. A keyword that can't be
    enforced is an error, even if the schema itself sets other options."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": False}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def of_schema(schema: dict[str, Any]) -> str:
    return f'{{"grammars":[{{"json_schema":{with_options(schema)}}}]}}'


def of_regex(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def of_choice(choices: Sequence[str]) -> str:
    return f"start: {' | '.join(map(literal, choices))}"


def literal(text: str) -> str:
    """Return a Lark terminal for exactly this text."""
    return json.dumps(text, ensure_ascii=False)
