"""Checks that answers have the types that the official clients of each API declare."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from openai.types import Completion, CompletionChoice, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from testing.client_shapes.recorded import Recorded, Refusal


def check_answer(request: Recorded, status: int, content_type: str, text: str) -> None:
    """Raises :class:`AssertionError` or pydantic's ``ValidationError`` unless the answer is what ``request``
    expects."""
    if request.refused is not None:
        _check_refusal(request.refused, status, json.loads(text))
        return
    assert status == 200, f"{status}: {text[:500]}"
    if request.streams:
        assert content_type.startswith("text/event-stream"), content_type
        STREAMS[request.endpoint](text)
    else:
        WHOLES[request.endpoint](json.loads(text))


def _check_refusal(refused: Refusal, status: int, answer: dict[str, Any]) -> None:
    error = answer["error"]
    got = Refusal(status, error.get("code", error["type"]), error["message"])
    assert (got.status, got.code) == (refused.status, refused.code), got
    assert refused.says in got.says, got


# --- types that the openai package lacks -----------------------------------------------------------


class _EchoedLogprobs(Logprobs):
    """An echoed prompt's first token has no log-probability."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class _TextChoice(CompletionChoice):
    """Before a choice's last chunk, its ``finish_reason`` is null."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]
    logprobs: _EchoedLogprobs | None = None


class TextCompletion(Completion):
    """A completion or a chunk of one, as OpenAI's API sends it and the client's own types leave it open."""

    choices: list[_TextChoice]  # type: ignore[assignment]


# --- whole answers ---------------------------------------------------------------------------------


def _of(kind: type[BaseModel]) -> Callable[[Any], None]:
    def check(answer: Any) -> None:
        kind.model_validate(answer)

    return check


def _models(answer: Any) -> None:
    for card in answer["data"]:
        Model.model_validate(card)


def _response(answer: Any) -> None:
    response = Response.model_validate(answer)
    assert response.status in ("completed", "incomplete")
    assert response.output


def _message(answer: Any) -> None:
    from anthropic.types import Message  # other endpoints are checked without it

    assert Message.model_validate(answer).stop_reason


def _count(answer: Any) -> None:
    assert answer.keys() == {"input_tokens"}
    assert answer["input_tokens"] > 0


WHOLES: dict[str, Callable[[Any], None]] = {
    "/v1/models": _models,
    "/v1/completions": _of(TextCompletion),
    "/v1/chat/completions": _of(ChatCompletion),
    "/v1/responses": _response,
    "/v1/messages": _message,
    "/v1/messages/count_tokens": _count,
}

# --- streams ---------------------------------------------------------------------------------------


def _events(text: str) -> list[tuple[str | None, str]]:
    """Returns name and data of each event. Comments are left out."""
    found = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ")[::2] for line in block.split("\n") if line and line[0] != ":"]
        if fields := dict(lines):
            found.append((fields.get("event"), fields["data"]))
    return found


def _chunks_of(kind: type[BaseModel]) -> Callable[[str], None]:
    def check(text: str) -> None:
        *events, (_, last) = _events(text)
        assert last == "[DONE]"
        ended = set()
        for _, data in events:
            chunk: Any = kind.model_validate_json(data)
            ended |= {choice.index for choice in chunk.choices if choice.finish_reason}
        assert ended, "no choice has ended"

    return check


@cache
def _response_event() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def _response_stream(text: str) -> None:
    events = _events(text)
    for number, (name, data) in enumerate(events):
        event = _response_event().validate_json(data)
        assert (event.type, event.sequence_number) == (name, number)
    last = json.loads(events[-1][1])
    assert last["type"] in ("response.completed", "response.incomplete")
    _response(last["response"])


def _message_stream(text: str) -> None:
    from anthropic.types import RawMessageStreamEvent  # other endpoints are checked without it

    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events = [one for one in _events(text) if one[0] != "ping"]
    for name, data in events:
        assert adapter.validate_json(data).type == name
    assert events[0][0] == "message_start"
    assert events[-1][0] == "message_stop"


STREAMS: dict[str, Callable[[str], None]] = {
    "/v1/completions": _chunks_of(TextCompletion),
    "/v1/chat/completions": _chunks_of(ChatCompletionChunk),
    "/v1/responses": _response_stream,
    "/v1/messages": _message_stream,
}
