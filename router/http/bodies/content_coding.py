"""Inflates compressed bodies: gzip and deflate."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from wire.errors import BodyEncodingError, InvalidRequestError

GZIP = 31
CODINGS = {"gzip": GZIP, "x-gzip": GZIP, "deflate": 15}
"""The codings that ``Content-Encoding`` may name, with zlib's window bits (RFC 9110, section 8.4.1)."""
MAX_MEMBERS = 1024
"""The maximum number of gzip members (gzip streams that follow one another) of a body. It is limited because
each member costs time, even an empty one of 20 bytes. The tool bgzip makes a member of every 64 KiB: with
this limit, its bodies may have 64 MiB."""


class Inflater:
    """Inflates one body piece by piece, and never returns more bytes than the caller asks for."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._num_members = 0
        self._begin_member()

    def push(self, data: bytes, max_bytes: int) -> bytes:
        """Return the inflated bytes of ``data``, at most ``max_bytes``. If exactly ``max_bytes`` are
        returned, there may be more.

        Raises :class:`InvalidRequestError` for corrupt data.
        """
        inflated = b""
        while True:
            try:
                inflated += self._stream.decompress(data, max_bytes - len(inflated))
            except zlib.error as error:
                raise self._corrupt(str(error)) from error
            data = self._stream.unused_data
            if not data or len(inflated) == max_bytes:
                return inflated
            if CODINGS[self._coding] != GZIP:
                raise self._corrupt("more data follows its end")
            self._begin_member()

    def end(self) -> None:
        """Check that the data was complete. Raises :class:`InvalidRequestError` if its end is missing."""
        if not self._stream.eof:
            raise self._corrupt("it ends too early")

    def _begin_member(self) -> None:
        """Begin the next gzip member. Gzip data may have several, one after the other (RFC 1952, section
        2.2)."""
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            raise InvalidRequestError(
                f"the body has more than {MAX_MEMBERS} gzip members, which is the limit: compress it as one"
            )
        self._stream = zlib.decompressobj(CODINGS[self._coding])

    def _corrupt(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the body does not match its header Content-Encoding: {self._coding} ({why}): compress it "
            "again, or send it uncompressed without that header"
        )


def inflater_of(headers: Iterable[tuple[bytes, bytes]]) -> Inflater | None:
    """Return an inflater for the body; None if the body is not compressed. Raises :class:`BodyEncodingError`
    for a coding that is not supported."""
    values = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    if not values:
        return None
    said = ",".join(values)
    codings = [coding for coding in (part.strip().lower() for part in said.split(",")) if coding]
    codings = [coding for coding in codings if coding != "identity"]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in CODINGS:
        raise BodyEncodingError(
            f"Content-Encoding {said[:80]!r} is not supported: use one of gzip and deflate, or none"
        )
    return Inflater(codings[0])
