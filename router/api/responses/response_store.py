"""Keeps responses, so that clients can read, continue and delete them.

A response belongs to the name of the API key that asked for it; to others it does not exist.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NoReturn, Protocol

from router.http.openai_errors import shown
from wire.errors import PreviousResponseError, UnknownIdError

START_WITH = "this router stores no responses; its operator can start it with --response-store FILE"


@dataclass(frozen=True)
class StoredResponse:
    """A response with all that is needed to continue it. Each part is JSON."""

    id: str
    previous_id: str | None
    """The response that this one continues."""
    response: bytes
    """The response object without its output."""
    input: bytes
    """The list of the request's own items."""
    output: bytes
    """The list of the answer's items."""


class ResponseStore(Protocol):
    keeps: bool
    """Whether anything is stored at all."""

    async def save(self, owner: str, response: StoredResponse) -> None:
        """Store a response. If that is impossible, it is logged: the answer goes out all the same."""

    async def find(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises :class:`UnknownIdError`."""

    async def conversation(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Return a response that is about to be continued, behind all those that it continues itself. From
        now on they are as new as if they had just been made.

        Raises :class:`PreviousResponseError`, and :class:`InvalidRequestError` if they are too long.
        """

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises :class:`UnknownIdError`."""

    async def keep_purging(self) -> None:
        """Delete what has expired, again and again, until this task is cancelled."""

    def close(self) -> None:
        """Wait for what is being stored. Blocks."""


class NoStore:
    """The store of a router that keeps no responses."""

    keeps = False

    async def save(self, owner: str, response: StoredResponse) -> None:
        raise AssertionError("nothing is stored where nothing is kept")

    async def find(self, owner: str, response_id: str) -> StoredResponse:
        self._refuse(response_id)

    async def conversation(self, owner: str, response_id: str) -> list[StoredResponse]:
        raise PreviousResponseError(
            f"previous_response_id {shown(response_id)}: {START_WITH}. Or send the items of earlier turns in "
            "input",
            param="previous_response_id",
        )

    async def delete(self, owner: str, response_id: str) -> None:
        self._refuse(response_id)

    async def keep_purging(self) -> None:
        await asyncio.Event().wait()  # nothing ever expires

    def close(self) -> None:
        """Do nothing."""

    def _refuse(self, response_id: str) -> NoReturn:
        raise UnknownIdError(f"no response {shown(response_id)}: {START_WITH}")
