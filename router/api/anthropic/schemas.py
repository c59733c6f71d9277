"""Schemas of answers for OpenAPI. These classes only describe answers and check nothing."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    """The form of every error on these paths."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputTokens(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokens | None = None


class Message(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


_EVENTS = "The message's events as server-sent events; `message_stop` or `error` is the last one."


def answers(model: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Describe a route's answers. ``streams``: the answer is sent as server-sent events on request."""
    described: dict[str, Any] = {"model": model, "description": "The answer."}
    if streams:
        described["content"] = {"text/event-stream": {"schema": {"type": "string", "description": _EVENTS}}}
    return {200: described, "default": {"model": MessageError, "description": "Any error."}}
