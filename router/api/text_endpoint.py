"""The steps of all endpoints for text: read a request, check it, run it, and answer in a stream or in one
piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response

from router.access.client import Client, client_of
from router.api.request_headers import deadline_of
from router.api.reserve import reserve
from router.api.text_body import TextBody
from router.http.bodies.body_room import share_of
from router.http.bodies.json_body import read_json
from router.http.disconnect import WhileConnected
from router.http.event_stream import EventStream, LastWrite, WriteNow
from router.http.json_answer import JsonAnswer
from router.serving.answer import Answer, Delta
from router.serving.generation import Generation
from router.serving.services import Services, services_of
from router.serving.slice_lane import SliceLane
from router.serving.text_request import TextRequest
from router.serving.usage import Usage
from wire.errors import TwinfangError

Body = TypeVar("Body", bound=TextBody)


class Writer(Protocol):
    """Builds the JSON objects and events of one API from deltas."""

    async def begin(self, index: int, answer: Answer, slices: SliceLane) -> None:
        """Prepare the part of the answer that repeats a choice's prompt. To be awaited before anything of the
        choice is written."""

    def keep(self, index: int, delta: Delta) -> Delta:
        """Take the long lists out of ``delta``, convert them to JSON and keep them; return the rest of the
        delta. Only for answers that are not streamed."""

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """Return the answer as one object; ``deltas[i]`` is all of choice i except what :meth:`keep` took."""

    def written(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> bytes:
        """Return the events for one choice's new delta in a stream. They may be empty."""

    def watched(self, index: int) -> str | None:
        """Return the character up to which the further events of a choice differ only in their text
        (:attr:`PartReader.watched`). Empty: all of them do. None: the next event may differ."""

    def end(self, usage: Usage) -> bytes:
        """Return the events that end a stream. At least one."""

    def error_end(self, error: TwinfangError) -> bytes:
        """Return the events that end a stream that fails."""


async def answer_text(
    http: Request,
    kind: type[Body],
    check: Callable[[Request, Body, Services, Client, float], Awaitable[TextRequest]],
    writer_of: Callable[[TextRequest], Writer],
) -> Response:
    """Answer one request. ``check`` turns the body into a checked request; it also gets the client and the
    deadline."""
    services, client = services_of(http), client_of(http)
    try:
        deadline = deadline_of(http, services.config)
        request = await check(
            http,
            # Not stored in a variable, which would keep the body in memory until the answer ends.
            await _read_once_known(http, kind, services, client, deadline=deadline),
            services,
            client,
            deadline,
        )
        if client.api_key.limits is not None:
            request = await reserve(http, request, services)
    except BaseException as error:
        services.metrics.refused(client.api_key.name, error)
        raise
    share_of(http.scope).give_back()
    writer = writer_of(request)
    response: Response
    if request.stream:
        response = EventStream(partial(_events, request, writer, services), writer.error_end)
    else:
        with WhileConnected(http.scope):
            response = await _answer(request, writer, services)
    if request.reservation.headers:
        response.headers.update(request.reservation.headers)
    return response


async def _read_once_known(
    http: Request, kind: type[Body], services: Services, client: Client, *, deadline: float
) -> Body:
    """Read a request's body. If the requested model has had no server yet, wait for a server, because a
    model's limits come from its servers.

    Raises what :func:`read_json` and :meth:`Gate.wait_for_servers` raise, and :class:`CancelledRequestError`
    if the client goes away.
    """
    body = await read_json(http, kind)
    model = services.models.find(body.model)
    if not model.servers.has_limits:
        priority = body.priority_for(client.api_key)
        with WhileConnected(http.scope):
            await model.gate.wait_for_servers(client.name, priority, deadline=deadline)
    return body


async def _answer(request: TextRequest, writer: Writer, services: Services) -> Response:
    async with Generation(services, request) as generation:
        answers = generation.answers
        wholes = [Delta() for _ in answers]
        while deltas := await generation.step():
            for index, delta in deltas:
                wholes[index] += writer.keep(index, delta)
        for index, answer in enumerate(answers):
            await writer.begin(index, answer, services.slices)
        usage = _final_usage(generation, services)
    return JsonAnswer(writer.whole(wholes, usage))


async def _events(
    request: TextRequest, writer: Writer, services: Services, write_now: WriteNow
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of one write for each step: the events of all choices that have new deltas. A step with
    much to write has one write for each of its slices (:mod:`router.serving.slice_lane`).

    If the events differ only in their text (:attr:`TextRequest.tells_just_text`), a :class:`Lane` writes the
    text after the first token to the client. This generator then only wakes for what the lane can't write.
    """
    async with Generation(services, request) as generation:
        answers = generation.answers
        seen: set[int] = set()

        def written(index: int, delta: Delta) -> bytes:
            is_first = index not in seen
            seen.add(index)
            return writer.written(index, delta, answers[index], is_first=is_first)

        while deltas := await generation.step():
            for index, _ in deltas:
                if index not in seen:
                    await writer.begin(index, answers[index], services.slices)
            data = b"".join(written(index, delta) for index, delta in deltas)
            if generation.has_ended:
                yield LastWrite(data + writer.end(_final_usage(generation, services)))
            elif data:  # empty while a tool call is incomplete
                yield data
            # A lane calls the writer once, with a sample text, and later puts other texts in its place.
            if request.tells_just_text and not generation.has_ended:
                generation.take_lane(writer.watched(0), write_now, lambda text: written(0, Delta(text)))


def _final_usage(generation: Generation, services: Services) -> Usage:
    usage = generation.usage()
    services.metrics.prompt_tokens.inc(usage.num_prompt_tokens)
    services.metrics.cached_prompt_tokens.inc(usage.cached_tokens or 0)
    return usage
