"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, FailFast

from router.access.client import client_of
from router.api.openai.chat_prompt import ChatFields, chat_text
from router.api.openai.schemas import DetokenizedText, Tokens, answers
from router.http.bodies.json_body import body_schema, read_json
from router.http.disconnect import WhileConnected
from router.http.json_answer import JsonAnswer
from router.http.openai_errors import shown
from router.models.prompt import encode_text
from router.serving.services import services_of
from wire.errors import InvalidRequestError

router = APIRouter()

MAX_TOKEN_ID = (1 << 31) - 1


class TokenizeBody(ChatFields):
    """The body of a request to tokenize either a text or a chat."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


@router.post("/tokenize", responses=answers(Tokens), openapi_extra=body_schema(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Tokenize a text or a chat. A text gets the special tokens that a completion's prompt gets; a chat gets
    those of its template.

    A text that is far too long for a prompt is refused, as on the endpoints that answer prompts.
    """
    body = await read_json(request, TokenizeBody)
    model = services_of(request).models.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        param, text, add_special_tokens = "prompt", body.prompt, body.add_special_tokens is not False
    else:
        param, text = "messages", await chat_text(body, model)
        add_special_tokens = bool(body.add_special_tokens)
    client = client_of(request).name
    with WhileConnected(request.scope):
        token_ids = await encode_text(
            text,
            model.tokenizer,
            model.max_model_len,
            add_special_tokens=add_special_tokens,
            param=param,
            client=client,
        )
        wants_names = body.return_token_strs
        names = await model.tokenizer.texts_of(token_ids, client=client) if wants_names else None
    answer = {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
        "token_strs": names,
    }
    return JsonAnswer(answer)


@router.post("/detokenize", responses=answers(DetokenizedText), openapi_extra=body_schema(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Return the text of tokens, special tokens included. An id without a token has no text."""
    body = await read_json(request, DetokenizeBody)
    model = services_of(request).models.find(body.model)
    for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequestError(
                f"token ids must be between 0 and {MAX_TOKEN_ID}, got {shown(token_id)}", param="tokens"
            )
    with WhileConnected(request.scope):
        text = await model.tokenizer.decode_long(
            body.tokens, skip_special_tokens=False, client=client_of(request).name
        )
    return JsonAnswer({"prompt": text})
