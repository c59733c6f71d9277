"""The body of ``POST /v1/completions`` and what it asks for, once it is checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from router.openai_errors import shown
from router.sampling_fields import SamplingFields
from router.server_pool import ModelLimits
from router.services import Services
from wire.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from wire.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


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
    """The body as clients send it: types are checked, values not yet."""

    prompt: Any = Field(default=None, json_schema_extra=PROMPT_SCHEMA)
    """Checked by :func:`split_prompt`: a union of four types would blame a bad value on each of them."""
    max_tokens: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and its text where the client sent text."""

    token_ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request. Choice ``i * n + j`` is the j-th answer to prompt i."""

    id: str
    created: int
    model: str
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    """One a choice of a prompt: its length is ``n``."""
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    logprobs: int | None
    return_token_ids: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    cache_salt: str
    """Only requests with the same salt share cached prompts."""

    @property
    def n(self) -> int:
        return len(self.params)


async def check_completion(body: CompletionBody, services: Services, *, request_id: str) -> CompletionRequest:
    """Tokenizes and checks a body. Raises :class:`InvalidRequestError` that names what is wrong with it,
    and :class:`UnavailableError` while no server is there to say what the limits are."""
    model = check_model(body.model, services.config.model_name)
    body.check_extra_fields()
    body.check_stream_options()
    n = body.num_choices
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequestError(
            f"best_of is supported only if it equals n ({n}), got {shown(body.best_of)}; leave it out",
            param="best_of",
        )
    if body.suffix:
        raise InvalidRequestError("suffix is not supported by this model; leave it out", param="suffix")
    texts_or_ids = split_prompt(body.prompt)
    if len(texts_or_ids) * n > services.config.max_choices:
        raise InvalidRequestError(
            f"{len(texts_or_ids)} prompts with n = {n} make {len(texts_or_ids) * n} choices, the limit is "
            f"{services.config.max_choices}: send fewer at a time, or raise the router's --max-choices",
            param="prompt",
        )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens must be at least 1, got {shown(max_tokens)}", param="max_tokens"
        )
    stop = body.stop_strings
    limits = services.pool.limits()
    params = body.sampling_params(
        services.defaults, max_tokens=max_tokens, logprobs=body.logprobs, vocab_size=limits.vocab_size
    )
    prompts = []
    for item in texts_or_ids:
        prompts.append(await _prompt(item, body, services, limits))
        check_context(len(prompts[-1].token_ids), max_tokens, limits.max_model_len)
    options = body.stream_options
    return CompletionRequest(
        id=f"cmpl-{request_id}",
        created=int(time.time()),
        model=model,
        prompts=tuple(prompts),
        params=params,
        stop=stop,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None
        and bool(options.include_usage and options.continuous_usage_stats),
        echo=bool(body.echo),
        logprobs=body.logprobs,
        return_token_ids=bool(body.return_token_ids),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=body.cache_salt or "",
    )


def check_model(asked: str | None, served: str) -> str:
    """The model's name; a request that names none gets the one there is."""
    if asked is not None and asked != served:
        raise ModelNotFoundError(
            f"The model {shown(asked)} does not exist; this server has {served!r}", param="model"
        )
    return served


def split_prompt(prompt: Any) -> list[str] | list[list[int]]:
    """The prompts of any of the four forms: string, strings, token ids, lists of token ids."""
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
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, none of "
        f"them empty; got {shown(prompt)}",
        param="prompt",
    )


def check_context(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    total = num_prompt_tokens + max_tokens
    if total <= max_model_len:
        return
    room = max_model_len - num_prompt_tokens
    remedy = f"ask for at most {room} max_tokens or shorten the prompt" if room > 0 else "shorten the prompt"
    raise ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {total} "
        f"tokens ({num_prompt_tokens} in the prompt, {max_tokens} for the completion): {remedy}.",
        param="prompt" if room <= 0 else "max_tokens",
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


async def _prompt(
    item: str | Sequence[int], body: CompletionBody, services: Services, limits: ModelLimits
) -> Prompt:
    if not isinstance(item, str):
        _check_ids(item, limits.vocab_size)
        return Prompt(tuple(item), None)
    tokenizer = services.tokenizer
    longest = tokenizer.max_token_chars
    if longest is not None and len(item) > longest * limits.max_model_len:  # not worth tokenizing
        raise ContextLengthError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt has "
            f"{len(item)} characters, which can't be less than {len(item) // longest} tokens: shorten it.",
            param="prompt",
        )
    token_ids = await tokenizer.encode(item, add_special_tokens=body.add_special_tokens is not False)
    if not token_ids:
        raise InvalidRequestError("the prompt holds no token: it needs at least one", param="prompt")
    _check_ids(token_ids, limits.vocab_size)
    return Prompt(tuple(token_ids), item)


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"a prompt's token ids must be between 0 and {vocab_size - 1}, got {shown(token_id)}",
                param="prompt",
            )
