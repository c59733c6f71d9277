"""What a request has cost in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_answer_tokens: int
    cached_tokens: int | None
    """The part of the prompts that no server had to compute. None while the answer runs: it is known at the
    end."""
    num_thinking_tokens: int | None = None
    """The part of the answers that is thinking. None if that is not known."""
