"""``traceparent`` of W3C Trace Context, level 1: a request's trace, and its parent span in that trace.

    00-<trace id, 32 hex digits>-<span id, 16>-<flags, 2; bit 0: sampled>

``tracestate`` is not passed on.
"""

from __future__ import annotations

import re

from wire.errors import WireError

_VERSION_0 = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LATER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_LENGTH = len("00-") + 32 + 1 + 16 + 1 + 2


def traceparent_of(header: str) -> str:
    """Returns the valid ``traceparent`` in a client's header; empty if the header is empty or malformed.

    For a later version only the fields of version 0 are used, as the standard requires.
    """
    if header.startswith("00"):
        return header if _VERSION_0.fullmatch(header) else ""
    return f"00{header[2:_LENGTH]}" if _LATER.fullmatch(header) else ""


def check_traceparent(value: str) -> None:
    """Raises :class:`WireError` unless ``value`` is empty or a ``traceparent`` of version 0."""
    if value and not _VERSION_0.fullmatch(value):
        raise WireError("traceparent: expected nothing or 00-<32 hex digits>-<16 hex digits>-<2 hex digits>")


def is_sampled(traceparent: str) -> bool:
    """Whether spans are to be recorded; False for a request without a trace."""
    return bool(traceparent) and bool(int(traceparent[-2:], 16) & 1)


def with_span(traceparent: str, span_id: str) -> str:
    """Returns the same trace with another parent span."""
    return f"{traceparent[:36]}{span_id}{traceparent[52:]}"
