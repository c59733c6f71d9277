"""What each API key was used for, in Prometheus' form: by its name, which is no secret."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class KeyFigures:
    """Counts nothing for requests of a router without keys, whose name is empty."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "twinfang_key_requests",
            "HTTP requests for text by API key and outcome, as twinfang_requests.",
            ["key", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "twinfang_key_tokens",
            "Tokens by API key and kind: prompt, each prompt once a choice, and generation. Of requests that "
            "were let in, however they ended.",
            ["key", "kind"],
            registry=registry,
        )

    def ended(self, key_name: str, outcome: str) -> None:
        if key_name:
            self._requests.labels(key_name, outcome).inc()

    def used(self, key_name: str, *, num_prompt_tokens: int, num_answer_tokens: int) -> None:
        if key_name:
            self._tokens.labels(key_name, "prompt").inc(num_prompt_tokens)
            self._tokens.labels(key_name, "generation").inc(num_answer_tokens)
