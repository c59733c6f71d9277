"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and the chats that ask for the same."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.api.anthropic.cache_control import CacheMarks
from router.api.anthropic.conversation import MESSAGES_SCHEMA, SYSTEM_SCHEMA, chat_messages
from router.api.anthropic.tools import TOOLS_SCHEMA, ToolChoice, chat_tools
from router.api.openai.chat import ChatBody
from router.api.text_body import TextBody, ranged
from wire.errors import InvalidRequestError
from wire.messages.sampling_params import RANGES

SAME_IN_CHATS = (
    "stream",
    "priority",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "cache_salt",
    "session_id",
)
"""Fields of a request for an answer that a chat has too."""
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""A chat's words for efforts."""


class Strict(BaseModel):
    """An object inside a body. Its unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


class Thinking(Strict):
    """Whether the model thinks before it answers, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a chat that say the same. Templates have one of two names for the switch."""
        thinks = self.type != "disabled"
        said: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks}}
        if self.type == "enabled" and self.budget_tokens is not None:
            said["thinking_token_budget"] = self.budget_tokens
        if self.display == "omitted":
            said["include_reasoning"] = False
        return said


class OutputFormat(Strict):
    """The form that the answer must have."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")

    def fields(self) -> dict[str, Any]:
        said = {"name": "answer", "schema": self.json_schema}
        return {"response_format": {"type": "json_schema", "json_schema": said}}


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    """What the client says of the request. It has no effect."""

    user_id: str | None = None


class PromptFields(TextBody):
    """The fields that a prompt is made from, and those that the count of its tokens ignores."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (None,),
        "context_management": (
            None,
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "fallbacks": (None, []),
        "mcp_servers": (None, []),
        "thread": (None, False),
    }

    messages: Any = Field(default=None, json_schema_extra=MESSAGES_SCHEMA)
    system: Any = Field(default=None, json_schema_extra=SYSTEM_SCHEMA)
    tools: Any = Field(default=None, json_schema_extra=TOOLS_SCHEMA)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of ``output_config.format``."""
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields of a chat that asks the same. Raises :class:`InvalidRequestError`."""
        marks = CacheMarks()
        marks.check({"cache_control": self.cache_control}, "")
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": chat_messages(self.system, self.messages, marks),
        }
        if tools := chat_tools(self.tools, marks):
            fields["tools"] = tools
        if marks.longest is not None:
            fields["prompt_cache_retention"] = marks.longest
        for part in (self.tool_choice, self.thinking, self._format()):
            if part is not None:
                fields |= part.fields()
        if self.output_config is not None and self.output_config.effort is not None:
            fields["reasoning_effort"] = EFFORTS[self.output_config.effort]
        if given := self.chat_template_kwargs:
            fields["chat_template_kwargs"] = fields.get("chat_template_kwargs", {}) | given
        return fields

    def _format(self) -> OutputFormat | None:
        new = None if self.output_config is None else self.output_config.format
        if new is not None and self.output_format is not None:
            raise InvalidRequestError(
                "output_config.format and output_format can't both be followed: give one of them"
            )
        return new or self.output_format


class CountBody(PromptFields):
    """The body of a request for the number of a prompt's tokens."""

    def chat(self) -> ChatBody:
        return ChatBody.model_validate(self.prompt_fields())


class MessageBody(PromptFields):
    """The body of a request for an answer."""

    max_tokens: int = Field(json_schema_extra={"minimum": 1, "maximum": RANGES["max_tokens"][1]})
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = ranged(*RANGES["temperature"])
    top_p: float | None = ranged(*RANGES["top_p"])
    top_k: int | None = ranged(-1, RANGES["top_k"][1])
    seed: int | None = ranged(*RANGES["seed"])
    cache_salt: str | None = None
    session_id: str | None = None

    def chat(self) -> ChatBody:
        """Return the chat that asks for the same. Raises :class:`InvalidRequestError`."""
        stops = self.stop_sequences or []
        if "" in stops:
            raise InvalidRequestError(
                "stop_sequences: a string must have at least 1 character, got 0: leave empty strings out"
            )
        same = {name: getattr(self, name) for name in SAME_IN_CHATS}
        return ChatBody.model_validate(self.prompt_fields() | same | {"stop": stops})
