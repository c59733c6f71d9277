"""The events of OpenAI's streams of text: chunks with their usage, the end, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.http.event_stream import DONE, event
from router.http.openai_errors import error_body
from router.serving.answer import Answer
from router.serving.text_request import TextRequest
from router.serving.usage import Usage
from wire.errors import TwinfangError


class ChunkEvents:
    """Turns the chunks of one request into events."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request

    def written(self, chunks: Sequence[dict[str, Any]], index: int, answer: Answer) -> bytes:
        """Return the events of one choice's chunks."""
        request = self._request
        if request.include_usage:
            usage = None
            if request.continuous_usage:
                num_prompt_tokens = len(request.prompts[index // request.n].token_ids)
                usage = usage_object(
                    Usage(num_prompt_tokens, answer.num_tokens, None, answer.num_thinking_tokens)
                )
            for chunk in chunks:
                chunk["usage"] = usage
        return event(chunks[0]) if len(chunks) == 1 else b"".join(map(event, chunks))

    def end(self, head: dict[str, Any], usage: Usage) -> bytes:
        """Return the end of a stream: the chunk without choices that has the usage, if the client asked for
        it, and the end's mark."""
        if not self._request.include_usage:
            return DONE
        return event({**head, "choices": [], "usage": usage_object(usage)}) + DONE


def error_end(error: TwinfangError) -> bytes:
    """Return the end of a stream that fails."""
    return event(error_body(error)) + DONE


def usage_object(usage: Usage) -> dict[str, Any]:
    written: dict[str, Any] = {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_answer_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_answer_tokens,
    }
    if usage.cached_tokens is not None:
        written["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    details = {
        "reasoning_tokens": usage.num_thinking_tokens,
        "accepted_prediction_tokens": usage.num_accepted_drafts,
        "rejected_prediction_tokens": usage.num_rejected_drafts,
    }
    if known := {name: number for name, number in details.items() if number is not None}:
        written["completion_tokens_details"] = known
    return written
