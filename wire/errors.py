"""The only hierarchy of errors.

Each class has what an HTTP client sees: the status, OpenAI's error ``type`` and a machine-readable ``code``.
Messages name the value, the limit and the remedy. Settings are written in `backticks`: the command line shows
them as its flags.

The message of a server's failure (5xx) is for operators: it may name addresses, files and libraries' errors.
Clients read :attr:`TwinfangError.public`, which decides what they see.

This module belongs to ``wire`` because an error raised in one process is often reported by another: it is
sent as ``(code, message)``, and :func:`error_from_code` makes an error of the same class again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

TransferFailure = Literal[
    "deadline", "peer_gone", "lease_ended", "handshake_refused", "metadata", "ticket_refused", "digest"
]
"""Why state was not handed over. Servers count failed transfers by these causes."""


class TwinfangError(Exception):
    """Base of every error that Twinfang raises on purpose."""

    http_status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    told_clients: ClassVar[str] = "the server failed on this request; its log says why"
    """The text that clients read for a server's failure, if the error was not made by :meth:`told`."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        """For the log and for operators. Clients read :attr:`public`."""
        self.param = param
        self.where = ""
        """The servers where the error happened, for the log; empty if unknown."""
        self._public: str | None = None

    @classmethod
    def told(cls, message: str, *, detail: str = "") -> Self:
        """Returns an error whose ``message`` clients may read. Operators read ``detail`` if it is given."""
        error = cls(detail or message)
        error._public = message
        return error

    @property
    def public(self) -> str:
        """The text that clients read. For a wrong request this is the whole message; for a server's failure
        it is a text chosen for clients."""
        if self._public is not None:
            return self._public
        return self.message if self.http_status < 500 else self.told_clients


class InvalidRequestError(TwinfangError):
    """The request can't be served in its present form; sending it again won't help."""

    http_status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested completion don't fit into the model's context."""

    code = "context_length_exceeded"


class GrammarError(InvalidRequestError):
    """A schema or another grammar can't be compiled, or is too complex to be followed."""

    code = "invalid_grammar"


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""

    http_status = 404
    code = "model_not_found"


class UnknownIdError(InvalidRequestError):
    """The URL's path names a worker, a request or a stored response that does not exist."""

    http_status = 404
    code = "not_found"


class PreviousResponseError(InvalidRequestError):
    """The request continues a response that is not stored here."""

    code = "previous_response_not_found"


class UnsupportedEndpointError(InvalidRequestError):
    """The URL belongs to an API that this server does not have."""

    http_status = 404
    code = "unsupported_endpoint"


class ConflictError(InvalidRequestError):
    """The request contradicts the present state: it adds what already exists, or undoes what is final."""

    http_status = 409
    code = "conflict"


class AdminTokenError(TwinfangError):
    """A request to the admin API has no admin token, or a wrong one."""

    http_status = 401
    type = "invalid_request_error"
    code = "invalid_admin_token"


class BodyTooLargeError(InvalidRequestError):
    """The request's body exceeds the limit in bytes."""

    http_status = 413
    code = "body_too_large"


class BodyEncodingError(InvalidRequestError):
    """The request's body is compressed in an unsupported way."""

    http_status = 415
    code = "unsupported_content_encoding"


class AuthenticationError(InvalidRequestError):
    """The request has no API key, or an invalid one."""

    http_status = 401
    code = "invalid_api_key"


class PermissionDeniedError(InvalidRequestError):
    """The request asks for something that its API key does not allow."""

    http_status = 403
    code = "permission_denied"


class HostNotAllowedError(InvalidRequestError):
    """The request names a host that isn't this router's."""

    http_status = 403
    code = "host_not_allowed"


class OriginNotAllowedError(InvalidRequestError):
    """A browser sent the request for a page of another site."""

    http_status = 403
    code = "origin_not_allowed"


class OverloadedError(TwinfangError):
    """There is no room now for the request or for its answer. It may be sent again after ``retry_after_s``
    seconds; None: the same request will never be taken."""

    http_status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = 1) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s
        self.headers: Mapping[str, str] = {}
        """Further headers of the answer."""


class RateLimitError(OverloadedError):
    """An API key has used as much as it may for now."""

    code = "rate_limit_exceeded"


class QuotaError(OverloadedError):
    """An API key has used up its budget of tokens."""

    type = "insufficient_quota"
    code = "insufficient_quota"


class UnavailableError(TwinfangError):
    """A process that is needed can't be reached, is not ready or is about to stop.

    To clients it usually means that no healthy server of a needed role can take the request.
    """

    http_status = 503
    code = "no_server_available"
    told_clients = "no server can take the request now; send it again"


class UnreachableError(UnavailableError):
    """There is no connection to the process, or it was lost, so the process has not answered.

    Only the caller itself can find that out: sent to another process, this becomes its base class.
    """


class GroupLostError(TwinfangError):
    """A rank that others compute with is gone or has failed; they can't compute anything without it."""

    http_status = 503
    code = "group_lost"
    told_clients = "a server that the model needs is gone; send the request again"


class DeviceFaultError(TwinfangError):
    """A server's GPU has failed. Only a new process can use the GPU again."""

    http_status = 503
    code = "device_fault"
    told_clients = "a server's GPU failed; send the request again"


class DeadlineError(TwinfangError):
    """Something took longer than its deadline."""

    http_status = 504
    code = "deadline_exceeded"
    told_clients = "the request was not finished within its time limit"


class CancelledRequestError(TwinfangError):
    """The request was given up, for example because its client is gone or reads nothing, or because its
    server moves its requests to other servers."""

    http_status = 499
    code = "cancelled"


class AbortedRequestError(TwinfangError):
    """An operator has ended the request. Its client is still connected and should not send it again."""

    http_status = 499
    code = "aborted"

    @classmethod
    def by_operator(cls) -> AbortedRequestError:
        return cls("an operator has ended this request")


class ConfigError(TwinfangError):
    """A setting is missing or invalid, contradicts another setting, or can't work on this machine."""

    code = "invalid_configuration"
    told_clients = "the server is not configured for this request; its log says what is missing"


class CapacityError(ConfigError):
    """The memory budget is too small for the configuration; the message shows the arithmetic."""

    code = "insufficient_capacity"


class ModelLoadError(ConfigError):
    """A checkpoint can't be read or has an unknown architecture, or one of its tensors is missing or has the
    wrong shape."""

    code = "model_load_failed"


class WireError(TwinfangError):
    """A message from another process is malformed or has another protocol version."""

    code = "malformed_message"
    told_clients = "a message between servers could not be read; send the request again"


class ProtocolVersionError(WireError):
    """Another process is of a release that this one can't work with."""

    code = "protocol_version"
    told_clients = "servers of two releases do not understand each other; send the request again"

    @classmethod
    def between(cls, theirs: object, oldest: int, newest: int) -> ProtocolVersionError:
        """``theirs`` is the other process's version, the others are those that this process understands."""
        ours = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        return cls(
            f"the peer speaks protocol version {theirs}, this process {ours}: "
            "upgrade by one release at a time"
        )


class TransferError(TwinfangError):
    """State could not be moved between two servers."""

    http_status = 502
    code = "transfer_failed"
    told_clients = (
        "a prompt's state did not reach a decode server from its prefill server; send the request again"
    )
    cause: TransferFailure = "peer_gone"

    def __init__(
        self, message: str, *, param: str | None = None, cause: TransferFailure | None = None
    ) -> None:
        super().__init__(message, param=param)
        if cause is not None:
            self.cause = cause


class HandshakeError(TransferError):
    """A server can't use another server's state: their models or memory layouts differ, or the other server
    has restarted or can't be read. The message gives the values that differ."""

    code = "handshake_refused"
    cause: TransferFailure = "handshake_refused"


class LeaseError(TransferError):
    """A lease is unknown, has ended or belongs to another incarnation."""

    code = "lease_ended"
    cause = "lease_ended"


class SanitizerError(TwinfangError):
    """Blocks or state are damaged, or a step would use wrong memory. The message says where, and which value
    was expected and found."""

    code = "state_corrupted"
    told_clients = "a server found the request's state damaged and ended it; send the request again"


def _subclasses(base: type[TwinfangError]) -> list[type[TwinfangError]]:
    found = [base]
    for child in base.__subclasses__():
        found.extend(_subclasses(child))
    return found


def all_codes() -> list[str]:
    """Returns the codes of all errors, sorted."""
    return sorted({cls.code for cls in _subclasses(TwinfangError)})


def all_statuses() -> set[int]:
    """Returns the HTTP statuses of all errors."""
    return {cls.http_status for cls in _subclasses(TwinfangError)}


def error_from_code(code: str, message: str) -> TwinfangError:
    """Returns an error like the one that another process raised and sent.

    For an unknown code, which a newer peer may send, it is a plain :class:`TwinfangError`.
    """
    kinds = (cls for cls in _subclasses(TwinfangError) if cls.code == code)
    return next(kinds, TwinfangError)(message)
