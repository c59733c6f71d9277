"""What one choice asks of the servers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from wire.sampling_params import SamplingParams


@dataclass(frozen=True)
class Choice:
    """One answer to one prompt."""

    request_id: str
    """Unique among all requests of the router."""
    token_ids: tuple[int, ...]
    params: SamplingParams
    prompt_logprobs: int | None = None
    cache_salt: str = ""
    client: str = ""
    """Name of whose choice it is."""
    session: str | None = None
    """Requests of one session go to the same servers."""

    @property
    def is_scored(self) -> bool:
        """Whether no answer is wanted: the prompt's log-probabilities alone, or not even these."""
        return self.params.max_tokens == 0

    @property
    def seeded(self) -> Choice:
        """With a seed of its own if it has none: wherever it goes on, it draws the same tokens."""
        if self.params.seed is not None:
            return self
        return replace(self, params=replace(self.params, seed=secrets.randbits(63)))
