"""The fields that a chat's prompt is made from, and the prompt's text as the checkpoint's template renders
it."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from router.api.openai.reasoning_fields import ReasoningFields
from router.http.bodies.bounds import num_chars_of
from router.models.catalog import ServedModel
from router.models.chat_messages import MESSAGES_SCHEMA, TOOLS_SCHEMA, checked_messages
from router.models.prompt import check_chars
from router.models.reasoning.earlier_turns import with_reasoning
from router.models.reasoning.reasoning_format import ReasoningFormat
from router.models.tokenizer import INLINE_CHARS
from router.models.tools.tool_choice import offered_tools
from wire.errors import InvalidRequestError

OF_THE_PROMPT = ("messages", "tools", "tool_choice", "add_generation_prompt")


class ChatFields(ReasoningFields):
    """The fields that chat templates read. :mod:`router.models.chat_messages` checks messages and tools."""

    messages: Any = Field(default=None, json_schema_extra=MESSAGES_SCHEMA)
    tools: Any = Field(default=None, json_schema_extra=TOOLS_SCHEMA)
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    """Null means false: templates write special tokens themselves."""


async def chat_text(body: ChatFields, model: ServedModel) -> str:
    """Return the prompt's text. Raises :class:`InvalidRequestError`."""
    template = model.chat_template
    if template is None:
        raise InvalidRequestError(
            "this model has no chat template: use /v1/completions, or put a chat_template.jinja into the "
            "model's folder and restart the router",
            param="messages",
        )
    variables = _variables(body, None if model.reasoning is None else model.reasoning.form)
    num_chars = sum(
        len(message["content"]) + len(message.get("reasoning_content") or "")
        for message in variables["messages"]
    )
    check_chars(num_chars, model.tokenizer, model.max_model_len, param="messages")  # before it is rendered
    if num_chars_of(variables) <= INLINE_CHARS:
        return template.render(variables)
    return await asyncio.to_thread(template.render, variables)


def _variables(body: ChatFields, form: ReasoningFormat | None) -> dict[str, Any]:
    for name in OF_THE_PROMPT:
        if name in (body.chat_template_kwargs or {}):
            raise InvalidRequestError(
                f"chat_template_kwargs may not contain {name}, which is a field of its own: give it there",
                param="chat_template_kwargs",
            )
    tools, choice = offered_tools(body.tools, body.tool_choice)
    variables: dict[str, Any] = {
        "messages": with_reasoning(checked_messages(body.messages), form),
        "tools": None if choice == "none" else tools,
        "documents": None,
        "add_generation_prompt": body.add_generation_prompt is not False,
    }
    if choice is not None:  # templates test whether it is defined
        variables["tool_choice"] = choice
    return variables | body.template_variables()
