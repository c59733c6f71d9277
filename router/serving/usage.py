"""What a request has cost in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.serving.answer import Answer
from wire.errors import DeadlineError, TwinfangError


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_answer_tokens: int
    cached_tokens: int | None
    """The part of the prompts that no server had to compute. None while the answer runs: it is known at the
    end."""
    num_thinking_tokens: int | None = None
    """The part of the answers that is thinking. None if that is not known."""
    num_accepted_drafts: int | None = None
    """The part of the answers that was drafted. None if servers made no drafts."""
    num_rejected_drafts: int | None = None
    """Drafts that did not become tokens of the answers."""


def usage_of(num_prompt_tokens: int, answers: Sequence[Answer], cached_tokens: int) -> Usage:
    thinking = [number for answer in answers if (number := answer.num_thinking_tokens) is not None]
    stats = [answer.stats for answer in answers if answer.stats is not None and answer.stats.drafted_tokens]
    accepted = sum(one.accepted_tokens for one in stats)
    return Usage(
        num_prompt_tokens,
        sum(answer.num_tokens for answer in answers),
        cached_tokens,
        sum(thinking) if thinking else None,
        accepted if stats else None,
        sum(one.drafted_tokens for one in stats) - accepted if stats else None,
    )


def billed_tokens(usage: Usage, error: BaseException | None) -> int:
    """Return what a request has cost its key. A request that fails before its first token costs nothing; one
    that its client gives up, or that had too little time, costs what was generated, and its prompt. Clients
    choose deadlines: prompts that servers computed in vain would be free otherwise."""
    is_refused = isinstance(error, TwinfangError) and error.http_status < 500
    has_failed = isinstance(error, Exception) and not is_refused and not isinstance(error, DeadlineError)
    if has_failed and not usage.num_answer_tokens:
        return 0
    return usage.num_prompt_tokens + usage.num_answer_tokens
