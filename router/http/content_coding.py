"""Bodies that were sent compressed: gzip and deflate."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from wire.errors import BodyEncodingError, InvalidRequestError

CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""What ``Content-Encoding`` may name, with zlib's window bits for it (RFC 9110, section 8.4.1)."""


class Inflater:
    """Undoes one body's coding piece by piece, and never makes more bytes than it is asked for."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream = zlib.decompressobj(CODINGS[coding])

    def push(self, data: bytes, max_bytes: int) -> bytes:
        """The bytes that ``data`` stands for, ``max_bytes`` at most: so many may mean that there are more.

        Raises :class:`InvalidRequestError` for corrupt data.
        """
        try:
            inflated = self._stream.decompress(data, max_bytes)
        except zlib.error as error:
            raise self._corrupt(str(error)) from error
        if self._stream.unused_data:
            raise self._corrupt("more data follows its end")
        return inflated

    def end(self) -> None:
        """Raises :class:`InvalidRequestError` if there should have been more."""
        if not self._stream.eof:
            raise self._corrupt("it ends too early")

    def _corrupt(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the body is not what Content-Encoding: {self._coding} says ({why}): compress it again, "
            "or send it as it is without that header"
        )


def inflater_of(headers: Iterable[tuple[bytes, bytes]]) -> Inflater | None:
    """None for a body that comes as it is. Raises :class:`BodyEncodingError` for any other coding."""
    said = ",".join(value.decode("latin-1") for name, value in headers if name == b"content-encoding")
    codings = [coding for coding in (part.strip().lower() for part in said.split(",")) if coding]
    codings = [coding for coding in codings if coding != "identity"]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in CODINGS:
        raise BodyEncodingError(
            f"Content-Encoding {said[:80]!r} is not supported: send one of gzip and deflate, or none"
        )
    return Inflater(codings[0])
