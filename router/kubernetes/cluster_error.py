"""What goes wrong between a process and the Kubernetes API."""

from __future__ import annotations

from typing import Literal, get_args

from wire.errors import TwinfangError

Cause = Literal["config", "unreachable", "refused", "gone", "broken", "silent", "garbage"]
"""
| cause | is |
|---|---|
| ``config`` | credentials or address of the API server can't be had |
| ``unreachable`` | no connection comes about |
| ``refused`` | an answer with a status other than 200 |
| ``gone`` | 410: what changed since the given version is not known there any more |
| ``broken`` | the connection ended in the midst of an answer |
| ``silent`` | nothing came for too long |
| ``garbage`` | what came is no answer of a Kubernetes API |
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)


class ClusterError(TwinfangError):
    """The Kubernetes API can't be asked, or does not answer as it should."""

    http_status = 503
    code = "cluster_unavailable"

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause
