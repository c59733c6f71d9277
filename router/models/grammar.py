"""Grammars in llguidance's form, which decode servers make answers follow.

What a client gets wrong in one is found before anything is dispatched: :mod:`router.models.grammar_checker`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

WHITESPACE = r"\x20|\n[\x20\t]{0,20}"
"""Between a JSON text's parts: a small model would write blanks for ever where it may."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def with_options(schema: dict[str, Any]) -> str:
    """A JSON schema as text, and with it how its JSON is written. A keyword that can't be enforced is an
    error, whatever the schema says itself."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": False}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def of_schema(schema: dict[str, Any]) -> str:
    return f'{{"grammars":[{{"json_schema":{with_options(schema)}}}]}}'


def of_regex(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def of_choice(choices: Sequence[str]) -> str:
    return f"start: {' | '.join(map(literal, choices))}"


def literal(text: str) -> str:
    """A Lark terminal for just this text."""
    return json.dumps(text, ensure_ascii=False)
