"""``POST /v1/responses``, and ``POST /v1/responses/input_tokens``, which counts the tokens of its prompt."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.access.client import client_of
from router.api.openai.chat_prompt import chat_text
from router.api.openai.schemas import answers
from router.api.responses.body import ResponseBody
from router.api.responses.exchange import Exchange, items_of, named_as_here
from router.api.responses.schemas import EVENTS, InputTokens, ResponseObject
from router.api.text_endpoint import answer_text
from router.http.bodies.json_body import body_schema, read_json
from router.http.disconnect import WhileConnected
from router.http.event_stream import EventStream
from router.http.json_answer import JsonAnswer
from router.models.prompt import encode_text
from router.serving.services import services_of

router = APIRouter()


class StoringStream(Response):
    """A stream whose response is stored before the stream's last write. So a client that has read the end can
    continue the response, on whatever process of the router."""

    def __init__(self, stream: Response, exchange: Exchange) -> None:
        super().__init__()
        self._stream = stream
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_stored(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await self._exchange.save()
            await send(message)

        await self._stream(scope, receive, send_stored)


@router.post(
    "/v1/responses",
    responses=answers(ResponseObject, stream=EVENTS),
    openapi_extra=body_schema(ResponseBody),
)
async def create_response(request: Request) -> Response:
    exchange = Exchange(request)
    response = await answer_text(request, ResponseBody, exchange.check, exchange.writer)
    if isinstance(response, EventStream):
        return StoringStream(response, exchange)
    await exchange.save()
    return response


@router.post(
    "/v1/responses/input_tokens",
    responses=answers(InputTokens),
    openapi_extra=body_schema(ResponseBody),
)
async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that the same body would make for ``/v1/responses``."""
    body = await read_json(request, ResponseBody)
    model = services_of(request).models.find(body.model)
    earlier, new = await items_of(request, body)
    with named_as_here():
        text = await chat_text(body.chat([*earlier, *new]), model)
        with WhileConnected(request.scope):
            token_ids = await encode_text(
                text,
                model.tokenizer,
                model.max_model_len,
                add_special_tokens=False,
                param="messages",
                client=client_of(request).name,
            )
    return JsonAnswer({"object": "response.input_tokens", "input_tokens": len(token_ids)})
