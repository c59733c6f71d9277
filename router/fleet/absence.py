"""Why no request can be served: in words for clients, and in words for operators."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from wire.errors import UnavailableError

log = logging.getLogger(__name__)


class NobodyServesError(UnavailableError):
    """No server can take the request, so the router has sent it to none. A server that becomes available
    again may take it."""


@dataclass(frozen=True)
class Absence:
    """Which servers a router lacks, in two wordings."""

    missing: str
    """For clients: which servers are missing. Their addresses and answers are not shown."""
    detail: str
    """For the log and the admin API: each server's problem, and the remedy."""

    def error(self) -> NobodyServesError:
        return NobodyServesError.told(f"{self.missing}; send the request again later", detail=self.detail)


class AbsenceLog:
    """Logs why a router is not ready. The same reason is logged only once."""

    def __init__(self) -> None:
        self.has_been_ready = False
        self._last: str | None = None

    def saw(self, absence: Absence | None) -> None:
        detail = None if absence is None else absence.detail
        self.has_been_ready = self.has_been_ready or absence is None
        if detail == self._last:
            return
        self._last = detail
        if detail is None:
            log.info("ready")
        else:
            log.warning("not ready: %s", detail)
