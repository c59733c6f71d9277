"""Calls from one router process to its siblings, each on the sibling's own loopback port.

Every program of the machine can reach these ports. So each call carries a secret, which the supervisor of the
processes has made and which only they know.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from router.access.own_ports import PLAIN, OwnPorts
from router.admin.views.missing import MissingProcess
from router.config import ProcessPlace
from router.http.sockets import LOOPBACK

PREFIX = "/admin/process"
"""Addresses for siblings alone."""
TIMEOUT_S = 2.0
"""The time in which a sibling must answer."""
SHORT_TIMEOUT_S = 0.5
"""The same for a sibling that did not answer last time. It may be frozen, and each answer to an operator
would otherwise take as long as :data:`TIMEOUT_S`."""
SILENCE_S = 4.0
"""A stream of events that brings nothing for this long is given up. A sibling says something every second."""

Answer = TypeVar("Answer", bound=BaseModel)


class SiblingError(Exception):
    """A sibling did not answer, or not as it should. The text continues a sentence about the process."""


class Siblings:
    """The other processes on this port."""

    def __init__(self, place: ProcessPlace, own_ports: OwnPorts = PLAIN) -> None:
        self._scheme = own_ports.scheme
        self.ports = {i: port for i, port in enumerate(place.ports) if i != place.index}
        self._silent: set[int] = set()
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {place.secret}"},
            timeout=httpx2.Timeout(TIMEOUT_S, read=None),
            limits=httpx2.Limits(max_connections=None),
            verify=own_ports.called or False,  # the machine's own certificates take long to read
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self, process: int, method: str, path: str, kind: type[Answer], body: Any = None
    ) -> Answer | None:
        """Return a sibling's answer; None if it knows nothing of what was asked (404). Raises
        :class:`SiblingError`."""
        timeout_s = SHORT_TIMEOUT_S if process in self._silent else TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, self._url(process, path), json=body)
        except TimeoutError:
            self._silent.add(process)
            raise SiblingError(f"did not answer within {timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise SiblingError(f"can't be reached ({type(error).__name__})") from error
        self._silent.discard(process)
        if response.status_code == 404:
            return None
        try:
            response.raise_for_status()
            return kind.model_validate_json(response.content)
        except (httpx2.HTTPStatusError, ValidationError) as error:
            raise SiblingError(f"answered {response.status_code}, which can't be used") from error

    async def ask_all(
        self, method: str, path: str, kind: type[Answer], body: Any = None, *, only: int | None = None
    ) -> tuple[dict[int, Answer], list[MissingProcess]]:
        """Ask all siblings, or ``only`` one, at the same time. Return the answers, by process, and the
        siblings without one. A sibling that knows nothing of what was asked has no answer and is not
        missing."""
        asked = [process for process in self.ports if only in (None, process)]
        calls = (self.ask(process, method, path, kind, body) for process in asked)
        told = await asyncio.gather(*calls, return_exceptions=True)
        answers: dict[int, Answer] = {}
        missing = []
        for process, answer in zip(asked, told, strict=True):
            if isinstance(answer, SiblingError):
                missing.append(MissingProcess(process=process, problem=str(answer)))
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                answers[process] = answer
        return answers, missing

    async def events(self, process: int) -> AsyncIterator[tuple[str, str]]:
        """Yield name and data of a sibling's events. Raises :class:`SiblingError` when they end."""
        try:
            request = self._client.build_request("GET", self._url(process, "/events"))
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._client.send(request, stream=True)
            async with aclosing(response):
                response.raise_for_status()
                lines = response.aiter_lines()
                name = ""
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        line = await anext(lines)
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        yield name, line.removeprefix("data: ")
        except TimeoutError:
            raise SiblingError("does not answer") from None
        except StopAsyncIteration:
            raise SiblingError("ended its events") from None
        except httpx2.HTTPError as error:
            raise SiblingError(f"can't be reached ({type(error).__name__})") from error

    def _url(self, process: int, path: str) -> str:
        return f"{self._scheme}://{LOOPBACK}:{self.ports[process]}{PREFIX}{path}"
