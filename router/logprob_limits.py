"""How many log-probabilities one request may ask for."""

from __future__ import annotations

from router.sampling_fields import MAX_N
from wire.errors import InvalidRequestError
from wire.sampling_params import MAX_LOGPROBS

MAX_IN_STEP = MAX_N * (1 + MAX_LOGPROBS)
"""Of all choices in one step: OpenAI's own maxima of ``n`` and ``top_logprobs`` together. The event loop
writes each of them, in a microsecond or two."""
MAX_KEPT = 1 << 20
"""Of answers in one piece, and of prompts that are echoed: the router keeps them until all are there, and
each has 30 to 70 bytes."""


def check_in_step(num_choices: int, num_top: int, *, param: str) -> None:
    """Raises :class:`InvalidRequestError` if a step would bring too many."""
    num = num_choices * (1 + num_top)
    if num > MAX_IN_STEP:
        fewer_top = MAX_IN_STEP // num_choices - 1
        raise InvalidRequestError(
            f"{num_choices} choices with {num_top} alternatives a token make {num} log-probabilities a step, "
            f"the limit is {MAX_IN_STEP}: ask for at most {fewer_top} alternatives, or for fewer choices",
            param=param,
        )


def check_echoed(num_tokens: int, num_top: int, *, param: str) -> None:
    """``num_tokens`` are the prompts', each counted once a choice. Raises as :func:`check_in_step`."""
    num = num_tokens * (1 + num_top)
    if num > MAX_KEPT:
        raise InvalidRequestError(
            f"{num_tokens} tokens of echoed prompts, once a choice, with {num_top} alternatives each make "
            f"{num} log-probabilities, the limit is {MAX_KEPT}: ask for fewer alternatives, or echo less",
            param=param,
        )


def check_in_one_piece(num_choices: int, max_tokens: int, num_top: int, *, param: str) -> None:
    """Of an answer that is no stream. Raises as :func:`check_in_step`; ``param`` says how long it may be."""
    num = num_choices * max_tokens * (1 + num_top)
    if num > MAX_KEPT:
        raise InvalidRequestError(
            f"{num_choices} choices of {max_tokens} tokens with {num_top} alternatives each make {num} "
            f"log-probabilities in one piece, the limit is {MAX_KEPT}: set stream to true, or ask for at "
            f"most {longest_in_one_piece(num_choices, num_top)} {param}",
            param=param,
        )


def longest_in_one_piece(num_choices: int, num_top: int) -> int:
    """Tokens that each choice may have."""
    return MAX_KEPT // (num_choices * (1 + num_top))
