"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from router.access.client import Client
from router.api.openai.completion_response import CompletionWriter
from router.api.openai.logprobs import check_echoed, check_in_one_piece, check_in_step
from router.api.openai.schemas import CHUNKS, Completion, answers
from router.api.sampling_fields import UNSUPPORTED, SamplingFields, check_num_choices
from router.api.text_body import ranged
from router.api.text_endpoint import answer_text
from router.http.bodies.json_body import body_schema
from router.http.disconnect import while_connected
from router.http.openai_errors import shown
from router.models.prompt import Prompt, check_context, check_ids, encode_prompt
from router.models.structured_output import wanted_structure
from router.serving.services import Services
from router.serving.text_request import TextRequest
from wire.errors import InvalidRequestError
from wire.messages.sampling_params import RANGES

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}


class CompletionBody(SamplingFields):
    """The body as clients send it. Types are checked, values are not yet."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | {"max_completion_tokens": (None,)}

    prompt: Any = Field(default=None, json_schema_extra=PROMPT_SCHEMA)
    """:func:`split_prompt` checks it. If the field were a union of its four types, a bad value would get one
    error for each type."""
    max_tokens: int | None = ranged(*RANGES["max_tokens"])
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = ranged(*RANGES["logprobs"])
    suffix: str | None = None
    add_special_tokens: bool | None = None


@while_connected
async def check_completion(
    http: Request, body: CompletionBody, services: Services, client: Client, deadline: float
) -> TextRequest:
    """Tokenize and check a completion. Raises :class:`InvalidRequestError` that names what is wrong with the
    body, :class:`OverloadedError` if a queue is full, :class:`CancelledRequestError` if the client goes away,
    and :class:`UnavailableError` while the limits are not known because no server was ever connected."""
    model = services.models.find(body.model)
    model.gate.refuse_early(client.name, body.priority_for(client.api_key))
    body.check_extra_fields()
    body.check_stream_options()
    n = body.num_choices
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequestError(
            f"best_of is supported only if it equals n, which is {n}; got {shown(body.best_of)}: omit it",
            param="best_of",
        )
    if body.suffix:
        raise InvalidRequestError(
            f"suffix is not supported here, got {shown(body.suffix)}: leave it out", param="suffix"
        )
    texts_or_ids = split_prompt(body.prompt)
    check_num_choices(len(texts_or_ids), n, services.config.max_choices, param="prompt")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < (0 if body.echo else 1):
        least = "0 with echo: true" if body.echo else "1, or 0 with echo: true"
        raise InvalidRequestError(
            f"max_tokens must be at least {least}, got {shown(max_tokens)}", param="max_tokens"
        )
    structure = await wanted_structure(body, body.grammars(services, client))
    limits = model.servers.limits()
    params = body.sampling_params(
        model.defaults,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        vocab_size=limits.vocab_size,
        grammar=None if structure is None else structure.grammar,
    )
    prompts: list[Prompt] = []
    for item in texts_or_ids:
        if prompts:
            await asyncio.sleep(0)  # one prompt in each iteration of the loop: there may be hundreds
        if isinstance(item, str):
            special = body.add_special_tokens is not False
            prompt = await encode_prompt(
                item,
                model.tokenizer,
                limits,
                add_special_tokens=special,
                param="prompt",
                client=client.name,
                keep_text=bool(body.echo),
            )
        else:
            check_ids(item, limits.vocab_size, param="prompt")
            prompt = Prompt(tuple(item), None)
        check_context(len(prompt.token_ids), max_tokens, limits.max_model_len)
        prompts.append(prompt)
    if body.logprobs is not None:
        _check_logprobs(body, body.logprobs, prompts, max_tokens)
    return body.text_request(
        http,
        services,
        id_prefix="cmpl",
        model=model,
        prompts=prompts,
        params=params,
        client=client,
        deadline=deadline,
        echo=bool(body.echo),
    )


def _check_logprobs(body: CompletionBody, num_top: int, prompts: list[Prompt], max_tokens: int) -> None:
    num_choices = body.num_choices * len(prompts)
    check_in_step(num_choices, num_top, param="logprobs")
    if body.echo:
        num_tokens = body.num_choices * sum(len(prompt.token_ids) for prompt in prompts)
        check_echoed(num_tokens, num_top, param="logprobs")
    if not body.stream:
        check_in_one_piece(num_choices, max_tokens, num_top, param="max_tokens")


def split_prompt(prompt: Any) -> list[str] | list[list[int]]:
    """Return the prompts as a list. ``prompt`` may have four forms: string, strings, token ids, lists of
    token ids."""
    if isinstance(prompt, str) or _are_ids(prompt):
        prompt = [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) and item for item in prompt):
            return prompt
        if all(_are_ids(item) for item in prompt):
            return prompt
    if prompt is None or prompt in ([], [""], [[]]):
        raise InvalidRequestError("prompt is missing or empty: it needs at least one token", param="prompt")
    raise InvalidRequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, "
        f"none of them empty, got {shown(prompt)}",
        param="prompt",
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


router = APIRouter()


@router.post(
    "/v1/completions", responses=answers(Completion, stream=CHUNKS), openapi_extra=body_schema(CompletionBody)
)
async def create_completion(request: Request) -> Response:
    return await answer_text(request, CompletionBody, check_completion, CompletionWriter)
