"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's form."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from router.api_schemas import DetokenizedText, Tokens, answers
from router.chat_prompt import ChatFields, chat_text
from router.json_body import body_schema, read_json
from router.openai_errors import shown
from router.services import services_of
from wire.errors import InvalidRequestError

router = APIRouter()

MAX_TOKEN_ID = (1 << 31) - 1


class TokenizeBody(ChatFields):
    """Either a text or a chat."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: list[int]


@router.post("/tokenize", responses=answers(Tokens), openapi_extra=body_schema(TokenizeBody))
async def tokenize(request: Request) -> dict[str, Any]:
    """A text gets the special tokens that a completion's prompt gets; a chat those of its template."""
    body = await read_json(request, TokenizeBody)
    model = services_of(request).models.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
    else:
        text = await chat_text(body, model.chat_template)
        add_special_tokens = bool(body.add_special_tokens)
    token_ids = await model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    names = None
    if body.return_token_strs:
        names = [model.tokenizer.decode_token(token_id) for token_id in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
        "token_strs": names,
    }


@router.post("/detokenize", responses=answers(DetokenizedText), openapi_extra=body_schema(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, str]:
    """The text of tokens, special ones too; an id that is no token's has none."""
    body = await read_json(request, DetokenizeBody)
    model = services_of(request).models.find(body.model)
    for token_id in body.tokens:
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequestError(
                f"a token id must be between 0 and {MAX_TOKEN_ID}, got {shown(token_id)}", param="tokens"
            )
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
