"""Bodies that were sent compressed: gzip and deflate."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from wire.errors import BodyEncodingError, InvalidRequestError

GZIP = 31
CODINGS = {"gzip": GZIP, "x-gzip": GZIP, "deflate": 15}
"""What ``Content-Encoding`` may name, with zlib's window bits for it (RFC 9110, section 8.4.1)."""
MAX_MEMBERS = 1024
"""Each costs time, and an empty one has 20 bytes. The 64 KiB blocks of bgzip make a body of 64 MiB."""


class Inflater:
    """Undoes one body's coding piece by piece, and never makes more bytes than it is asked for."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._num_members = 0
        self._begin_member()

    def push(self, data: bytes, max_bytes: int) -> bytes:
        """The bytes that ``data`` stands for, ``max_bytes`` at most: so many may mean that there are more.

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
        """Raises :class:`InvalidRequestError` if there should have been more."""
        if not self._stream.eof:
            raise self._corrupt("it ends too early")

    def _begin_member(self) -> None:
        """Gzip data may be several, one behind the other (RFC 1952, section 2.2)."""
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            raise InvalidRequestError(
                f"the body has more than {MAX_MEMBERS} gzip members, which is the limit: compress it in one"
            )
        self._stream = zlib.decompressobj(CODINGS[self._coding])

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
