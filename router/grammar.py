"""Grammars in llguidance's form, which decode servers make answers follow.

What a client gets wrong is found here, before anything is dispatched. Schemas are compiled without a
tokenizer for that: milliseconds for most, a second for one of a hundred kilobytes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from wire.errors import GrammarError
from wire.sampling_params import MAX_GRAMMAR_BYTES

WHITESPACE = r"\x20|\n[\x20\t]{0,20}"
"""Between a JSON text's parts: a small model would write blanks for ever where it may."""
INLINE_CHARS = 1_000
"""Up to here checking takes no longer than a hop to another thread and back."""
MAX_MESSAGE_CHARS = 500
ANY_OBJECT: dict[str, Any] = {"type": "object"}

_LIMITS = LLParserLimits(verbose_errors=False)


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


def of_text(grammar: str, *, param: str) -> str:
    """Of Lark, or of what vLLM calls EBNF (GBNF)."""
    try:
        return grammar_from("grammar", grammar)
    except ValueError as error:
        raise GrammarError(f"{param}: {_short(str(error))}", param=param) from error


def literal(text: str) -> str:
    """A Lark terminal for just this text."""
    return json.dumps(text, ensure_ascii=False)


async def check(grammar: str, *, param: str) -> None:
    """Raises :class:`GrammarError`, with the library's message, for one that can't be compiled."""
    size = len(grammar.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"{param} makes a grammar of {size} bytes, the limit is {MAX_GRAMMAR_BYTES}: shorten it",
            param=param,
        )
    problem = _problem(grammar) if size <= INLINE_CHARS else await asyncio.to_thread(_problem, grammar)
    if problem:
        raise GrammarError(f"{param} can't be enforced: {problem}", param=param)


@lru_cache(maxsize=128)
def _problem(grammar: str) -> str:
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Rust's: no Exception, and nowhere to be imported from
            raise
        return f"the library fails on it: {_short(str(error))}"
    return _short(messages[0]) if is_error else ""


def _short(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"
