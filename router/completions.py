"""``POST /v1/completions``."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.answer import Answer, Delta
from router.completion_request import CompletionBody, CompletionRequest, check_completion
from router.completion_response import CompletionWriter, usage_of
from router.disconnect import run_until_disconnect
from router.dispatch import Choice
from router.event_stream import EventStream, event
from router.generation import Generation
from router.json_body import read_json
from router.openai_errors import request_id_of
from router.services import Services, services_of

router = APIRouter()

BODY_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": CompletionBody.model_json_schema()}},
    }
}


@router.post("/v1/completions", openapi_extra=BODY_SCHEMA)
async def create_completion(request: Request) -> Response:
    services = services_of(request)
    with services.metrics.refusals():
        body = await read_json(request, CompletionBody)
        completion = await check_completion(body, services, request_id=request_id_of(request))
    if completion.stream:
        return EventStream(_events(completion, services))
    return await run_until_disconnect(request.receive, _answer(completion, services))


async def _answer(request: CompletionRequest, services: Services) -> Response:
    async with _generation(request, services) as generation:
        answers = generation.answers
        wholes = [Delta() for _ in answers]
        while deltas := await generation.step():
            for index, delta in deltas:
                wholes[index] += delta
        usage = _final_usage(request, generation, services)
    return JSONResponse(CompletionWriter(request, services.tokenizer).whole(wholes, answers, usage))


async def _events(request: CompletionRequest, services: Services) -> AsyncGenerator[bytes, None]:
    """One event a choice and step; those of one step in one write."""
    writer = CompletionWriter(request, services.tokenizer)
    async with _generation(request, services) as generation:
        answers = generation.answers
        seen: set[int] = set()
        while deltas := await generation.step():
            events = []
            for index, delta in deltas:
                usage = None
                if request.continuous_usage:
                    num_prompt_tokens = len(request.prompts[index // request.n].token_ids)
                    usage = usage_of(num_prompt_tokens, answers[index].num_tokens, None)
                chunk = writer.chunk(index, delta, answers[index], is_first=index not in seen, usage=usage)
                seen.add(index)
                events.append(event(chunk))
            yield b"".join(events)
        usage = _final_usage(request, generation, services)
        if request.include_usage:
            yield event(writer.last_chunk(usage))


def _generation(request: CompletionRequest, services: Services) -> Generation:
    limits = services.pool.limits()
    choices = []
    for i, prompt in enumerate(request.prompts):
        wants_prompt_logprobs = request.echo and len(prompt.token_ids) > 1
        for j, params in enumerate(request.params):
            choice = Choice(
                # Two clients may choose the same X-Request-Id; the servers must still tell them apart.
                request_id=f"{request.id}-{i * request.n + j}-{secrets.token_hex(4)}",
                token_ids=prompt.token_ids,
                params=params,
                prompt_logprobs=request.logprobs if wants_prompt_logprobs else None,
                cache_salt=request.cache_salt,
            )
            answer = Answer(
                services.tokenizer,
                params,
                prompt_token_ids=prompt.token_ids,
                stop=request.stop,
                include_stop_str_in_output=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                eos_token_ids=limits.eos_token_ids,
            )
            choices.append((choice, answer))
    return Generation(services, choices)


def _final_usage(request: CompletionRequest, generation: Generation, services: Services) -> dict[str, object]:
    """Prompt tokens count once a prompt, whatever ``n`` is."""
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in request.prompts)
    cached = sum(generation.cached_tokens(i * request.n) for i in range(len(request.prompts)))
    services.metrics.prompt_tokens.inc(num_prompt_tokens)
    services.metrics.cached_prompt_tokens.inc(cached)
    return usage_of(num_prompt_tokens, sum(answer.num_tokens for answer in generation.answers), cached)
