"""What a chat request asks of tools: which may be called, and whether one must be called."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from router.http.openai_errors import shown
from router.models import grammar
from router.models.grammar_checker import OwnGrammars
from router.models.structured_output import Structure
from router.models.tokenizer import Tokenizer
from router.models.tools.call_scanner import CallScanner
from router.models.tools.format_names import FORMATS
from router.models.tools.tool_choice import FREE
from router.models.tools.tool_format import Terminal, Tool, ToolFormat
from wire.errors import GrammarError, InvalidRequestError

MAX_TOOLS_BLAMED = 16
"""If the grammar of all tools together can't be compiled, this many tools are checked one by one."""
ENFORCED = FORMATS["hermes"]
"""The format of enforced calls if the model's own format is not known."""


@dataclass(frozen=True)
class ToolUse:
    """How the answers of one chat may call tools."""

    form: ToolFormat
    tools: tuple[Tool, ...]
    max_calls: int | None
    """None if the model may make any number of calls."""
    grammar: str | None
    """The grammar that answers must follow. None if the model is free."""
    has_special_marks: bool
    """Whether a mark of the format is a special token. If so, the text of answers must show them."""

    def reader(self) -> CallScanner:
        """Return the reader of one answer."""
        return CallScanner(self.form, self.tools, max_calls=self.max_calls)


async def wanted_tool_use(
    tools: Sequence[dict[str, Any]] | None,
    choice: Any,
    form: ToolFormat | None,
    *,
    tokenizer: Tokenizer,
    structure: Structure | None,
    may_repeat: bool,
    grammars: OwnGrammars,
) -> ToolUse | None:
    """Return how answers may call tools. None if answers are just text. ``tools`` and ``choice`` were checked
    before. ``form`` is the model's own format.

    Raises :class:`InvalidRequestError` for a request that can't be enforced.
    """
    is_forced = choice not in FREE
    if not tools or choice == "none" or (form is None and not is_forced):
        return None
    form = form or ENFORCED
    allowed = [Tool.of(tool) for tool in tools]
    if is_forced and structure is not None:
        raise InvalidRequestError(
            f"tool_choice {shown(choice)} and {structure.param} can't both be followed: give one of them",
            param="tool_choice",
        )
    if isinstance(choice, dict):
        allowed = [tool for tool in allowed if tool.name == choice["function"]["name"]][:1]
        may_repeat = False
    lark: str | None = None if structure is None else structure.grammar
    answers: Callable[[Terminal], str] | None = None
    if is_forced:
        answers = partial(_calls, form, allowed, may_repeat=may_repeat)
    elif structure is not None and structure.schema is not None:
        answers = partial(_calls_or_json, form, allowed, structure.schema, may_repeat=may_repeat)
    elif structure is None and any(tool.is_strict for tool in allowed):
        answers = partial(_free, form, allowed, may_repeat=may_repeat)
    terminal = partial(_terminal, tokenizer)
    if answers is not None:
        try:
            await grammars.check(answers(grammar.literal), param="tools")
        except GrammarError:
            for tool in allowed[:MAX_TOOLS_BLAMED]:  # an error about one tool is clearer than one about all
                await grammars.check(grammar.of_schema(tool.parameters), param="tools")
            raise
        lark = answers(terminal)
    has_special_marks = any(terminal(mark) != grammar.literal(mark) for mark in (*form.begins, *form.marks))
    return ToolUse(form, tuple(allowed), None if may_repeat else 1, lark, has_special_marks)


def _calls(form: ToolFormat, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> str:
    """Return the grammar of calls."""
    rules = form.rules(tools, terminal, may_repeat=may_repeat)
    return "\n".join(["start: calls", *_begin(form, terminal), *rules])


def _calls_or_json(
    form: ToolFormat, tools: Sequence[Tool], schema: dict[str, Any], terminal: Terminal, *, may_repeat: bool
) -> str:
    """Return the grammar of calls, or of JSON of this schema."""
    rules = form.rules(tools, terminal, may_repeat=may_repeat)
    answer = f"answer: %json {grammar.with_options(schema)}"
    return "\n".join(["start: calls | answer", *_begin(form, terminal), *rules, answer])


def _free(form: ToolFormat, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> str:
    """Return the grammar of any text with any number of calls in it. Calls of strict tools follow their
    schemas.

    Without a begin mark, only its first character tells a call from other text, so other text can't begin
    with that character."""
    tools = [tool if tool.is_strict else replace(tool, parameters=grammar.ANY_OBJECT) for tool in tools]
    rules = form.rules(tools, terminal, may_repeat=may_repeat)
    if not form.begins:
        other = rf"OTHER: /\s*([^\s{re.escape(form.first_of_call)}](.|\n)*)?/"
        return "\n".join(["start: calls | OTHER", other, *rules])
    start = f"start: calls{'*' if may_repeat else '?'} ANY"
    return "\n".join([start, "ANY: /(.|\\n)*/", *_begin(form, terminal, "ANY"), *rules])


def _begin(form: ToolFormat, terminal: Terminal, before: str = "") -> list[str]:
    """Return the rule for the mark that begins a block, with the text before it. If the mark is text too, the
    rule must be lazy: it ends at the first mark."""
    if not form.begins:
        return []
    mark = terminal(form.begins[0])
    is_lazy = bool(before) and mark == grammar.literal(form.begins[0])
    return [f"begin{'[lazy]' if is_lazy else ''}: {before} {mark}"]


def _terminal(tokenizer: Tokenizer, mark: str) -> str:
    """Return the Lark terminal of a mark as the model writes it. A special token is named by its id, because
    text in a grammar does not match a special token."""
    token_id = tokenizer.special_id(mark)
    return grammar.literal(mark) if token_id is None else f"<[{token_id}]>"
