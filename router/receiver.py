"""Who takes what a decode server says of one request."""

from __future__ import annotations

from typing import Protocol

from wire.errors import TwinfangError
from wire.generation import RequestOutput


class Receiver(Protocol):
    """Is called on the event loop, between other requests' news: it neither waits nor raises."""

    def take(self, output: RequestOutput | TwinfangError) -> None:
        """After one with a finish reason, or an error, nothing more comes."""

    def take_tokens(self, token_ids: tuple[int, ...]) -> None:
        """News that is tokens and nothing else, as nearly all is."""
