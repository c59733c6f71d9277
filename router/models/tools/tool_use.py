"""What a chat request asks of tools: which may be called, and whether one must be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.http.openai_errors import shown
from router.models import grammar
from router.models.grammar_checker import GrammarChecker
from router.models.structured_output import Structure
from router.models.tokenizer import Tokenizer
from router.models.tools.call_scanner import CallScanner
from router.models.tools.format_names import FORMATS
from router.models.tools.tool_choice import FREE
from router.models.tools.tool_format import Marks, Tool, ToolFormat
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
    """Whether the marks are special tokens. If so, the text of answers must show them."""

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
    grammars: GrammarChecker,
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
    marks, text_marks = _marks(form, tokenizer), Marks(grammar.literal(form.begin), grammar.literal(form.end))
    lark: str | None = None
    if is_forced or (structure is not None and structure.schema is not None):
        schema = None if structure is None else structure.schema
        calls = _grammar(form, allowed, text_marks, schema, may_repeat=may_repeat)
        try:
            await grammars.check(calls, param="tools")
        except GrammarError:
            for tool in allowed[:MAX_TOOLS_BLAMED]:  # an error about one tool is clearer than one about all
                await grammars.check(grammar.of_schema(tool.parameters), param="tools")
            raise
        lark = _grammar(form, allowed, marks, schema, may_repeat=may_repeat)
    elif structure is not None:
        lark = structure.grammar
    return ToolUse(form, tuple(allowed), None if may_repeat else 1, lark, marks != text_marks)


def _grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    marks: Marks,
    schema: dict[str, Any] | None,
    *,
    may_repeat: bool,
) -> str:
    """Return the grammar of calls or, if there is a ``schema``, of calls or JSON of that schema."""
    rules = form.rules(tools, marks, may_repeat=may_repeat)
    if schema is None:
        return "\n".join(["start: calls", *rules])
    return "\n".join(["start: calls | answer", f"answer: %json {grammar.with_options(schema)}", *rules])


def _marks(form: ToolFormat, tokenizer: Tokenizer) -> Marks:
    """Return the marks as the model writes them. A special token is named by its id, because text in a
    grammar does not match a special token."""
    return Marks(*(_terminal(mark, tokenizer) for mark in (form.begin, form.end)))


def _terminal(mark: str, tokenizer: Tokenizer) -> str:
    token_id = tokenizer.special_id(mark)
    return grammar.literal(mark) if token_id is None else f"<[{token_id}]>"
