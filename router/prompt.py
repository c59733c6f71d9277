"""Prompts as token ids, checked against what the servers can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.model_servers import ModelLimits
from router.openai_errors import shown
from router.tokenizer import Tokenizer
from wire.errors import ContextLengthError, InvalidRequestError


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and its text where the client sent text."""

    token_ids: tuple[int, ...]
    text: str | None


async def encode_prompt(
    text: str, tokenizer: Tokenizer, limits: ModelLimits, *, add_special_tokens: bool, param: str
) -> Prompt:
    """Tokenizes what came in the field ``param``. Raises :class:`InvalidRequestError`."""
    longest = tokenizer.max_token_chars
    if longest is not None and len(text) > longest * limits.max_model_len:  # not worth tokenizing
        raise ContextLengthError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt has "
            f"{len(text)} characters, which can't be less than {len(text) // longest} tokens: shorten it.",
            param=param,
        )
    token_ids = await tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise InvalidRequestError("the prompt holds no token: it needs at least one", param=param)
    check_ids(token_ids, limits.vocab_size, param=param)
    return Prompt(tuple(token_ids), text)


def check_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"a prompt's token ids must be between 0 and {vocab_size - 1}, got {shown(token_id)}",
                param=param,
            )


def check_context(
    num_prompt_tokens: int,
    max_tokens: int,
    max_model_len: int,
    *,
    param: str = "prompt",
    length_param: str = "max_tokens",
) -> None:
    """``param`` holds the prompt, ``length_param`` says how long the answer may become."""
    total = num_prompt_tokens + max_tokens
    if total <= max_model_len:
        return
    room = max_model_len - num_prompt_tokens
    remedy = f"ask for at most {room} {length_param} or shorten the {param}"
    raise ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {total} "
        f"tokens ({num_prompt_tokens} in the {param}, {max_tokens} for the completion): "
        f"{remedy if room > 0 else f'shorten the {param}'}.",
        param=param if room <= 0 else length_param,
    )
