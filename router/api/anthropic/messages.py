"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.access.client import Client, client_of
from router.api.anthropic.message_body import CountBody, MessageBody
from router.api.anthropic.message_writer import MessageWriter
from router.api.anthropic.schemas import Message, TokenCount, answers
from router.api.openai.chat import check_chat
from router.api.openai.chat_prompt import chat_text
from router.api.text_endpoint import answer_text
from router.http.bodies.json_body import body_schema, read_json
from router.http.disconnect import WhileConnected
from router.http.json_answer import JsonAnswer
from router.http.openai_errors import request_id_of
from router.models.prompt import encode_text
from router.serving.services import Services, services_of
from router.serving.text_request import TextRequest
from wire.errors import InvalidRequestError

router = APIRouter()

THEIR_WORDS = {"response_format": "output_config.format", "thinking_token_budget": "thinking.budget_tokens"}
"""Fields of a chat, as requests name them here."""


async def check_message(
    http: Request, body: MessageBody, services: Services, client: Client, deadline: float
) -> TextRequest:
    """Check a request as the chat that asks for the same. Raises what :func:`check_chat` raises."""
    body.check_extra_fields()
    try:
        return await check_chat(http, body.chat(), services, client, deadline, id_prefix="msg")
    except InvalidRequestError as error:
        for ours, theirs in THEIR_WORDS.items():
            error.message = error.message.replace(ours, theirs)
        raise


@router.post("/v1/messages", responses=answers(Message, streams=True), openapi_extra=body_schema(MessageBody))
async def create_message(request: Request) -> Response:
    request_id = request_id_of(request)
    response = await answer_text(
        request, MessageBody, check_message, lambda checked: MessageWriter(checked, request_id)
    )
    response.headers["request-id"] = request_id
    return response


@router.post("/v1/messages/count_tokens", responses=answers(TokenCount), openapi_extra=body_schema(CountBody))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt. It is rendered and tokenized, and no server sees it."""
    body = await read_json(request, CountBody)
    model = services_of(request).models.find(body.model)
    body.check_extra_fields()
    text = await chat_text(body.chat(), model)
    with WhileConnected(request.scope):
        token_ids = await encode_text(
            text,
            model.tokenizer,
            model.max_model_len,
            add_special_tokens=False,
            param="messages",
            client=client_of(request).name,
        )
    return JsonAnswer({"input_tokens": len(token_ids)})
