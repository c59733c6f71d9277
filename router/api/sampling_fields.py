"""The fields that completions and chats share, and their conversion to sampling parameters and a request."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict

from router.access.cache_salt import cache_salt
from router.access.client import Client
from router.api.request_headers import session_of
from router.api.session_name import retention_of, session_id_of, session_name
from router.api.text_body import TextBody, ranged
from router.http.openai_errors import request_id_of, shown
from router.models.answer_parts import AnswerForm
from router.models.catalog import ServedModel
from router.models.grammar_checker import OwnGrammars
from router.models.prompt import Prompt
from router.models.reasoning.model_reasoning import ReasoningForm
from router.models.structured_output import StructuredFields
from router.observe.request_trace import begin_trace
from router.serving.services import Services
from router.serving.text_request import TextRequest
from wire.errors import InvalidRequestError
from wire.messages.sampling_params import RANGES, SamplingParams, Thinking

MAX_N = 128

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "truncate_prompt_tokens": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None, []),
    "prompt_embeds": (None,),
}
"""Fields of OpenAI or vLLM that are not supported but would change the answer, each with the values that
change nothing. Any other value is refused, because an answer that ignores the value is not what the client
asked for."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(StructuredFields, TextBody):
    """OpenAI's sampling fields and vLLM's extensions. ``null`` means the default, as in both APIs."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    stream_options: StreamOptions | None = None
    n: int | None = ranged(1, MAX_N)
    stop: str | list[str] | None = None
    seed: int | None = ranged(*RANGES["seed"])
    temperature: float | None = ranged(*RANGES["temperature"])
    top_p: float | None = ranged(*RANGES["top_p"])
    presence_penalty: float | None = ranged(*RANGES["presence_penalty"])
    frequency_penalty: float | None = ranged(*RANGES["frequency_penalty"])
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    top_k: int | None = ranged(-1, RANGES["top_k"][1])
    min_p: float | None = ranged(*RANGES["min_p"])
    repetition_penalty: float | None = ranged(*RANGES["repetition_penalty"])
    min_tokens: int | None = ranged(*RANGES["max_tokens"])
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    speculate: bool | None = None

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed with stream: true: set that, or leave stream_options out",
                param="stream_options",
            )

    def grammars(self, services: Services, client: Client) -> OwnGrammars:
        """Return the checks of grammars for a request of ``client``."""
        return OwnGrammars(services.grammars, client.name, self._salt(services, client))

    def _salt(self, services: Services, client: Client) -> str:
        return cache_salt(client.api_key, self.cache_salt or "", services.config.cache_isolation)

    @property
    def num_choices(self) -> int:
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_N:
            raise InvalidRequestError(f"n must be between 1 and {MAX_N}, got {shown(n)}", param="n")
        return n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise InvalidRequestError(
                "a stop string must have at least 1 character, got 0: leave empty strings out", param="stop"
            )
        return stops

    def sampling_params(
        self,
        defaults: Mapping[str, float],
        *,
        max_tokens: int,
        logprobs: int | None,
        vocab_size: int,
        grammar: str | None = None,
        thinking: Thinking | None = None,
    ) -> tuple[SamplingParams, ...]:
        """Return one set of parameters for each choice: choice j of a seeded request uses ``seed + j``. The
        choices of other requests get random seeds.

        A field that is not given gets the checkpoint's default. Raises :class:`InvalidRequestError`.
        """
        given = {name: getattr(self, name) for name in _NUMBERS}
        numbers = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        if numbers.get("top_k") == -1:
            numbers["top_k"] = 0
        seed = numbers.get("seed")
        # A random seed makes every server that continues an answer draw the same tokens.
        numbers["seed"] = random.getrandbits(63) if seed is None else seed
        params = SamplingParams(
            max_tokens=max_tokens,
            **numbers,
            logit_bias=tuple((_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            speculate=self.speculate is not False,
            grammar=grammar,
            thinking=thinking,
        )
        params.check_vocabulary(vocab_size)
        if (n := self.num_choices) == 1:
            return (params,)
        seeds = [random.getrandbits(63) if seed is None else _wrap(int(seed) + j) for j in range(n)]
        return tuple(dataclasses.replace(params, seed=seed) for seed in seeds)

    def text_request(
        self,
        http: Request,
        services: Services,
        *,
        id_prefix: str,
        model: ServedModel,
        prompts: Sequence[Prompt],
        params: tuple[SamplingParams, ...],
        client: Client,
        deadline: float,
        echo: bool = False,
        form: AnswerForm | None = None,
        reasoning: ReasoningForm | None = None,
    ) -> TextRequest:
        """Return the request that the checked fields describe, and begin its trace. Raises
        :class:`InvalidRequestError`, for example if the session's name is too long."""
        options = self.stream_options
        include_usage = options is not None and bool(options.include_usage)
        shows_marks = form is not None and form.has_special_marks
        session = session_of(http, services.config)
        session_id = session_id_of(http, self.session_id, self.prompt_cache_key)
        salt = self._salt(services, client)
        name = session_name(client.api_key, salt, session_id)
        request_id = f"{id_prefix}-{request_id_of(http)}"
        return TextRequest(
            id=request_id,
            created=int(time.time()),
            model=model,
            prompts=tuple(prompts),
            params=params,
            stop=self.stop_strings,
            stream=bool(self.stream),
            include_usage=include_usage,
            continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
            echo=echo,
            return_token_ids=bool(self.return_token_ids),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False and not shows_marks,
            cache_salt=salt,
            form=form,
            reasoning=reasoning,
            client=client,
            priority=self.priority_for(client.api_key),
            deadline=deadline,
            session=session,
            session_name=name,
            retention=retention_of(name, client, self.prompt_cache_retention),
            trace=begin_trace(http, request_id, services.tracing),
        )


def check_num_choices(num_prompts: int, n: int, max_choices: int, *, param: str) -> None:
    if num_prompts * n > max_choices:
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        raise InvalidRequestError(
            f"{prompts} with n = {n} are {num_prompts * n} choices, the limit is {max_choices}: "
            "send fewer at a time, or raise the router's --max-choices",
            param=param,
        )


_NUMBERS = tuple(name for name in (*RANGES, "min_tokens") if name in SamplingFields.model_fields)
"""Fields that become sampling parameters of the same name."""


def _wrap(seed: int) -> int:
    """Wrap ``seed`` into the range of a signed 64-bit integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _token_id(key: str) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise InvalidRequestError(
            f'the keys of logit_bias must be token ids as in {{"42": -100}}, got {shown(key)}',
            param="logit_bias",
        )
    return int(key)
