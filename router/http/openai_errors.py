"""Answers errors.

Every error has OpenAI's form, ``{"error": {"message", "type", "param", "code"}}``, except on the paths of an
API that has a form of its own (:mod:`router.http.error_form`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from router.http.error_form import ErrorForm, PublicError
from router.http.refusals import Refusals
from wire.errors import DeadlineError, InvalidRequestError, OverloadedError, TwinfangError
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

MAX_SHOWN_CHARS = 80
IN_WORDS_OF_JSON = {
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "list_type": "Input should be a valid array",
}
"""Messages that replace pydantic's. The body is already parsed, so pydantic would speak of Python's types."""

KIND_OF_UNION = re.compile(r"str|(list|dict)\[.*")
"""pydantic's path to a value may contain names of types, if a field may have several types. This pattern
matches such names."""

UNAVAILABLE_RETRY_AFTER_S = 1
"""``Retry-After`` of a 503. It is short because a request that is sent again soon waits in the router's
queue, for ``hold_s`` at most. If a server comes back meanwhile, a request in the queue is served sooner than
one that is sent again later. If this router is stopping, another router takes the request."""


class OpenAIErrors:
    """OpenAI's form."""

    def body(self, error: PublicError, request_id: str) -> dict[str, Any]:
        said = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        return {"error": said}

    def headers(self, request_id: str) -> dict[str, str]:
        return {}


OPENAI_ERRORS = OpenAIErrors()


def form_of(scope: Scope) -> ErrorForm:
    """Return the form of errors on a request's path: that of the API to which the path belongs."""
    forms: Mapping[str, ErrorForm] = scope["app"].state.error_forms
    path = scope["path"]
    return next((form for of, form in forms.items() if f"{path}/".startswith(f"{of}/")), OPENAI_ERRORS)


def error_body(error: TwinfangError) -> dict[str, Any]:
    """Return the JSON that a client of OpenAI's API gets for ``error``."""
    return OPENAI_ERRORS.body(PublicError.of(error), "")


def error_response(error: TwinfangError, scope: Scope) -> JSONResponse:
    """Return the response for ``error``, in the form of the API to which the request belongs."""
    response = _response(PublicError.of(error), scope)
    if isinstance(error, OverloadedError):
        if error.retry_after_s is not None:
            response.headers["Retry-After"] = str(error.retry_after_s)
        response.headers.update(error.headers)
    elif error.http_status == 503:
        response.headers["Retry-After"] = str(UNAVAILABLE_RETRY_AFTER_S)
    return response


def _response(error: PublicError, scope: Scope) -> JSONResponse:
    scope["app"].state.refusals.count(error.status, scope["path"])
    form, request_id = form_of(scope), scope.get("state", {}).get("request_id", "-")
    return JSONResponse(form.body(error, request_id), error.status, headers=form.headers(request_id))


def from_validation(error: ValidationError) -> InvalidRequestError:
    """Return an error that describes the first fault of a body in one sentence."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return InvalidRequestError(f"the body must be a JSON object, got {shown(first['input'])}")
    param, *inner = map(str, first["loc"])
    where = ".".join([param, *(part for part in inner if not KIND_OF_UNION.fullmatch(part))])
    if first["type"] == "missing":
        return InvalidRequestError(f"{where} is missing: it is required", param=param)
    message = IN_WORDS_OF_JSON.get(first["type"], first["msg"])
    return InvalidRequestError(f"{where}: {message}, got {shown(first['input'])}", param=param)


def shown(value: object) -> str:
    """Return the ``repr`` of a client's value, cut to a length that fits a message."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > MAX_SHOWN_CHARS:
            return f"{text[:MAX_SHOWN_CHARS]}…"
    return text


def _pieces(value: object) -> Iterator[str]:
    """Yield the pieces of a value's ``repr``. The ``repr`` of a megabyte would take long, so the caller stops
    when it has enough."""
    if isinstance(value, str):
        yield repr(value[: MAX_SHOWN_CHARS + 1])
    elif isinstance(value, list):
        yield "["
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for i, (name, item) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _pieces(name)
            yield ": "
            yield from _pieces(item)
        yield "}"
    else:
        yield repr(value)


def answer_error(request: Request, error: TwinfangError) -> JSONResponse:
    """Return the response for ``error``, and log the error if it is not the client's fault."""
    tell_log(request.scope, error)
    return error_response(error, request.scope)


def answer_unexpected(request: Request, error: Exception) -> JSONResponse:
    """Return the response for an error that nobody expected, with a line in the log. The traceback is logged
    by the server, to which the error is raised as well."""
    log.error("request %s failed: %s: %s", request_id_of(request), type(error).__name__, error)
    failure = TwinfangError.told("the router failed on this request; its log says why")
    return error_response(failure, request.scope)


def tell_log(scope: Scope, error: TwinfangError) -> None:
    """Log all that is known of ``error``, unless the error is the client's fault. Many errors of one kind
    become one line and a count."""
    if error.http_status < 500:
        return
    state = scope.get("state", {})
    level, kind = logging.ERROR, error.code
    if isinstance(error, DeadlineError) and state.get("chose_deadline"):
        level, kind = logging.INFO, f"{kind}, chosen by clients"
    elif error.where:
        kind = f"{kind} at {error.where}"
    request_id = state.get("request_id", "-")
    lines.write(level, kind, "request %s: %s: %s", request_id, kind, error.message)


def install_error_handlers(app: FastAPI, forms: Mapping[str, ErrorForm], refusals: Refusals) -> None:
    """Make ``app`` answer every error in the form of its API, including errors of routing and of the
    framework, and count it.

    ``forms`` has the forms of APIs other than OpenAI's. Its keys are the beginnings of their paths.
    """
    app.state.error_forms = forms
    app.state.refusals = refusals

    async def on_twinfang_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TwinfangError)
        return answer_error(request, error)

    async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message, code, headers = str(error.detail), "http_error", dict(error.headers or {})
        if error.status_code == 404:
            message, code = f"Unknown request URL: {request.method} {request.url.path}", "unknown_url"
        elif error.status_code == 405:
            message = f"{request.method} is not allowed for {request.url.path}"
            code = "method_not_allowed"
            headers = _with_head(headers)
        response = _response(
            PublicError(error.status_code, "invalid_request_error", code, message), request.scope
        )
        response.headers.update(headers)
        return response

    async def on_unexpected(request: Request, error: Exception) -> JSONResponse:
        return answer_unexpected(request, error)

    async def on_bad_parameter(request: Request, error: Exception) -> JSONResponse:
        """Answer a bad parameter of a path or a query. :func:`read_json` checks bodies."""
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        message = f"{name} {shown(first.get('input'))}: {first['msg']}"
        return error_response(InvalidRequestError(message, param=name), request.scope)

    app.add_exception_handler(RequestValidationError, on_bad_parameter)
    app.add_exception_handler(TwinfangError, on_twinfang_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_unexpected)


def _with_head(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return a route's ``Allow`` header, with HEAD added if the header has GET. Routes do not know that the
    router answers HEAD as well (:mod:`router.http.head`)."""
    allowed = [name.strip() for name in (headers or {}).get("Allow", "").split(",")]
    return {"Allow": ", ".join([*allowed, "HEAD"] if "GET" in allowed and "HEAD" not in allowed else allowed)}


def request_id_of(request: Request) -> str:
    return str(request.scope["state"].get("request_id", "-"))
