"""Reads the recorded requests of this folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MAX_TOKENS = 48
"""Answers are cut to this length: what is tested is their shape."""
LENGTH_FIELDS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}


@dataclass(frozen=True)
class Refusal:
    status: int
    code: str
    """``code`` of OpenAI's errors, ``type`` of Anthropic's."""
    says: str
    """A part of the message."""


@dataclass(frozen=True)
class Recorded:
    """A request that a client sent."""

    name: str
    client: str
    version: str
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] | None = None
    refused: Refusal | None = None
    """None if the request is answered."""

    @property
    def endpoint(self) -> str:
        return self.path.partition("?")[0]

    @property
    def streams(self) -> bool:
        return bool(self.body and self.body.get("stream"))

    def body_for(self, model: str) -> dict[str, Any] | None:
        """Returns the body, for another model and with a short answer. Recorded bodies that give no length
        get one: the answer might fill the context otherwise."""
        if self.body is None:
            return None
        fields = LENGTH_FIELDS.get(self.endpoint)
        if fields is None:
            return self.body | {"model": model}
        field = next((name for name in fields if self.body.get(name) is not None), fields[-1])
        length = min(self.body.get(field) or MAX_TOKENS, MAX_TOKENS)
        return self.body | {"model": model, field: length}


def recorded() -> dict[str, list[Recorded]]:
    """Returns the requests by client."""
    found: dict[str, list[Recorded]] = {}
    for file in sorted(FOLDER.glob("*.json")):
        for fields in json.loads(file.read_text(encoding="utf-8")):
            refused = fields.pop("refused", None)
            one = Recorded(**fields, refused=None if refused is None else Refusal(**refused))
            found.setdefault(one.client, []).append(one)
    return found
