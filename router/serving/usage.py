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
