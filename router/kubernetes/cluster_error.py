"""Errors of calls to the Kubernetes API."""

from __future__ import annotations

from typing import Literal, get_args

from wire.errors import TwinfangError

Cause = Literal["config", "unreachable", "refused", "gone", "broken", "silent", "garbage"]
"""
| cause | is |
|---|---|
| ``config`` | credentials or address of the API server are missing or can't be read |
| ``unreachable`` | no connection can be made |
| ``refused`` | an answer with a status other than 200 |
| ``gone`` | 410: the API server no longer knows what changed since the given version |
| ``broken`` | the connection ended before the answer was complete |
| ``silent`` | nothing came for too long |
| ``garbage`` | the answer is not an answer of a Kubernetes API |
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)


class ClusterError(TwinfangError):
    """The Kubernetes API can't be called, or does not answer as it should."""

    http_status = 503
    code = "cluster_unavailable"

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause
