"""Errors in Anthropic's form: ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

from __future__ import annotations

from typing import Any

from router.http.error_form import PublicError

PATH = "/v1/messages"
"""Errors on this path and below it have this form."""
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrors:
    """Anthropic's form. The statuses are those of all APIs of this router: a missing server is a 503, where
    Anthropic's own service says 529."""

    def body(self, error: PublicError, request_id: str) -> dict[str, Any]:
        other = "invalid_request_error" if error.type == "invalid_request_error" else "api_error"
        said = {"type": TYPES.get(error.status, other), "message": error.message}
        return {"type": "error", "error": said, "request_id": request_id}

    def headers(self, request_id: str) -> dict[str, str]:
        return {"request-id": request_id}


ANTHROPIC_ERRORS = AnthropicErrors()
