"""In which form clients read errors: each API has its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from wire.errors import TwinfangError


@dataclass(frozen=True)
class PublicError:
    """What a client learns of an error."""

    status: int
    type: str
    """OpenAI's type of the error."""
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: TwinfangError) -> PublicError:
        return cls(error.http_status, error.type, error.code, error.public, error.param)


class ErrorForm(Protocol):
    """Writes the errors of one API."""

    def body(self, error: PublicError, request_id: str) -> dict[str, Any]:
        """Return the JSON that a client gets for ``error``. The HTTP status is that of ``error``."""

    def headers(self, request_id: str) -> dict[str, str]:
        """Return the headers that clients of this API expect besides those of all answers."""
