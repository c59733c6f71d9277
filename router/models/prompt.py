"""Prompts as token ids, checked against what the servers can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from router.fleet.model_servers import ModelLimits
from router.http.openai_errors import shown
from router.models.tokenizer import Tokenizer
from wire.errors import ContextLengthError, InvalidRequestError

HEAD_CHARS_A_TOKEN = 8
"""If a text has more characters than this for each token of the context, its beginning is tokenized first."""
HEAD_MARGIN_TOKENS = 256
"""The beginning of a text, tokenized alone, may have this many tokens more than as a part of the whole text,
because its last word is cut and may be split into other tokens."""
UNTOLD_MODEL_LEN = 1 << 17
"""The context's length in tokens that is assumed until a server has reported it."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens and, if the client sent text that is needed again, its text."""

    token_ids: tuple[int, ...]
    text: str | None


async def encode_text(
    text: str,
    tokenizer: Tokenizer,
    max_model_len: int | None,
    *,
    add_special_tokens: bool,
    param: str,
    client: str,
) -> list[int]:
    """Return the token ids of a text, but refuse a text that is far too long for a prompt.

    Tokenizing a text of 8 MB takes a gigabyte, and seconds. So a text that can't fit is refused before it is
    tokenized, because of its length or of the number of tokens of its beginning. ``max_model_len`` is None
    until a server has reported it. Raises :class:`ContextLengthError`, and :class:`OverloadedError` if too
    many long texts of ``client`` wait.
    """
    encode = partial(tokenizer.encode, add_special_tokens=add_special_tokens, client=client)
    max_model_len = UNTOLD_MODEL_LEN if max_model_len is None else max_model_len
    check_chars(len(text), tokenizer, max_model_len, param=param)
    num_head_chars = HEAD_CHARS_A_TOKEN * max_model_len
    if len(text) > num_head_chars:
        head = await encode(text[:num_head_chars])
        if len(head) > max_model_len + HEAD_MARGIN_TOKENS:
            raise _too_long(
                max_model_len,
                f"{len(text)} characters, of which the first {num_head_chars} are {len(head)} tokens",
                param,
            )
    return await encode(text)


def check_chars(num_chars: int, tokenizer: Tokenizer, max_model_len: int | None, *, param: str) -> None:
    """Refuse a text that would be too long even if each token stood for as many characters as the longest
    one. Raises :class:`ContextLengthError`."""
    longest = tokenizer.max_token_chars
    max_model_len = UNTOLD_MODEL_LEN if max_model_len is None else max_model_len
    if longest is not None and num_chars > longest * max_model_len:
        raise _too_long(
            max_model_len,
            f"{num_chars} characters, which can't be less than {num_chars // longest} tokens",
            param,
        )


def _too_long(max_model_len: int, said: str, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {said}: "
        "shorten it.",
        param=param,
    )


async def encode_prompt(
    text: str,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    *,
    add_special_tokens: bool,
    param: str,
    client: str,
    keep_text: bool = False,
) -> Prompt:
    """Tokenize the text of a request's field ``param``. Raises :class:`InvalidRequestError`, and what
    :func:`encode_text` raises."""
    token_ids = await encode_text(
        text,
        tokenizer,
        limits.max_model_len,
        add_special_tokens=add_special_tokens,
        param=param,
        client=client,
    )
    if not token_ids:
        raise InvalidRequestError("the prompt holds no token: it needs at least one", param=param)
    check_ids(token_ids, limits.vocab_size, param=param)
    return Prompt(tuple(token_ids), text if keep_text else None)


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
    """Check that prompt and answer fit into the context. The field ``param`` holds the prompt,
    ``length_param`` says how long the answer may become. Raises :class:`ContextLengthError`."""
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
