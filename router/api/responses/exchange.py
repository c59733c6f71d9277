"""One call of ``POST /v1/responses``, from its body to the response that is stored."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import orjson
from fastapi import Request
from pydantic_core import from_json

from router.access.client import Client, client_of
from router.api.openai.chat import check_chat
from router.api.responses.body import ResponseBody
from router.api.responses.input_items import Item, checked_items
from router.api.responses.own_responses import OwnResponses
from router.api.responses.response_store import StoredResponse
from router.api.responses.response_writer import ResponseWriter
from router.heap import fitted
from router.http.bodies.body_room import share_of
from router.http.bodies.json_shape import check_shape
from router.http.bodies.turn_lane import LARGE_BODY_BYTES
from router.serving.services import Services
from router.serving.text_request import TextRequest
from wire.errors import InvalidRequestError


class Exchange:
    """What one request asked, and its answer. Lasts until the response is stored."""

    def __init__(self, http: Request) -> None:
        self._responses = responses_of(http)
        self._id = f"resp_{secrets.token_hex(24)}"
        self._previous_id: str | None = None
        self._input: bytes | None = None
        """The request's own items as JSON. None if the response is not to be stored."""
        self._head: dict[str, Any] = {}
        self._writer: ResponseWriter | None = None

    async def check(
        self, http: Request, body: ResponseBody, services: Services, client: Client, deadline: float
    ) -> TextRequest:
        """Check a body, and render and tokenize its chat. Raises what :func:`check_chat` raises, and
        :class:`PreviousResponseError`."""
        earlier, new = await items_of(http, body)
        with named_as_here():
            chat = body.chat([*earlier, *new])
            if self._responses.keeps and body.store is not False:
                self._input = fitted(orjson.dumps([{"id": _new_id(item), **item} for item in new]))
            del earlier, new  # their texts are in the chat
            request = await check_chat(http, chat, services, client, deadline, id_prefix="resp")
        if request.form is not None and request.logprobs is not None:
            raise InvalidRequestError(
                "include, top_logprobs: only answers that are text alone have log-probabilities: leave out "
                "these fields, or tools; if the model may think, ask /v1/chat/completions for them",
                param="include",
            )
        self._previous_id = body.previous_response_id
        self._head = self._head_of(body, request)
        return replace(request, stream=bool(body.stream))

    def writer(self, request: TextRequest) -> ResponseWriter:
        self._writer = ResponseWriter(request, self._head)
        return self._writer

    async def save(self) -> None:
        """Store the response, if it is whole and to be stored."""
        finished = None if self._writer is None else self._writer.finished
        if self._input is None or finished is None:
            return
        output = orjson.dumps(finished["output"])
        response = orjson.dumps({name: value for name, value in finished.items() if name != "output"})
        stored = StoredResponse(self._id, self._previous_id, response, self._input, output)
        await self._responses.save(stored)

    def _head_of(self, body: ResponseBody, request: TextRequest) -> dict[str, Any]:
        """Return the fields of the response that repeat what was asked. Long ones are kept as JSON, which
        takes far less memory."""
        params = request.params[0]
        text, reasoning = body.text, body.reasoning
        asked = {
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "text": {"format": (text and text.format) or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": request.created,
            "model": request.model.name,
            "background": False,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self._input is not None,
            "temperature": params.temperature,
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
            **{name: orjson.Fragment(fitted(orjson.dumps(value))) for name, value in asked.items()},
        }


def responses_of(http: Request) -> OwnResponses:
    """Return the stored responses of the client that sent a request."""
    state = http.app.state
    return OwnResponses(state.response_store, state.response_turns, client_of(http))


async def items_of(http: Request, body: ResponseBody) -> tuple[list[Item], list[Item]]:
    """Return the items of the responses that a body continues, and those of its own input. Raises
    :class:`InvalidRequestError`."""
    body.check_values()
    given, body.input = body.input, None
    new = checked_items(given)
    if body.previous_response_id is None:
        if not new and not body.instructions:
            raise InvalidRequestError("input is missing or empty: give a text or items", param="input")
        return [], new
    earlier = await responses_of(http).conversation(body.previous_response_id)
    return await parsed_items(http, earlier), new


async def parsed_items(http: Request, responses: list[StoredResponse]) -> list[Item]:
    """Return the items of stored responses: of each its input, then its output. They count as a part of the
    request's body. Raises :class:`OverloadedError` if there is no room for them."""
    pieces = [piece for one in responses for piece in (one.input, one.output)]
    data = b"[%b]" % b",".join(pieces)
    share = share_of(http.scope)
    share.take(len(data))
    check_shape(data, what="the conversation that is continued", param="previous_response_id")
    if len(data) <= LARGE_BODY_BYTES:
        return _flat(data)
    async with share.turn():
        return _flat(data)


def _flat(data: bytes) -> list[Item]:
    return [item for items in from_json(data) for item in items]


NAMED_HERE = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    ".function.parameters": ".parameters",
}
"""Names in the chat that a body becomes, and in the body."""


@contextmanager
def named_as_here() -> Iterator[None]:
    """Make errors about the chat, which the client has not written itself, name the fields of its body."""
    try:
        yield
    except InvalidRequestError as error:
        message, param = error.message, error.param
        for name, here in NAMED_HERE.items():
            message = message.replace(name, here)
            param = here.partition(".")[0] if param == name else param
        raise type(error)(message, param=param) from error


PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def _new_id(item: Item) -> str:
    return PREFIXES[item["type"]] + secrets.token_hex(24)
