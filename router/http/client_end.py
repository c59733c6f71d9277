"""A request's end of the connection to its client.

ASGI writes each part of an answer as a message through a coroutine, and shows that a client has gone only to
a task that waits for it. A stream makes thousands of writes, and a task costs more than most requests' own
work. So the connection itself writes parts and calls back when the client goes.

uvicorn writes the head of an answer and its body one after the other. Each write to a socket is a call of the
system that wakes the client. So a head waits for the body that follows at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_IN_SCOPE = "twinfang.client_end"


class ClientEnd:
    """Writes parts of one answer, and knows whether the client has gone.

    The connection closes it when the answer is complete or the connection is lost. Then nothing refers to
    uvicorn's objects any longer: they refer to the scope, which holds this object, and such a cycle would
    stay until the next garbage collection.
    """

    __slots__ = (
        "_cycle",
        "_flow",
        "_flush",
        "_has_written",
        "_head",
        "_is_chunked",
        "_on_gone",
        "_transport",
        "_write",
        "is_gone",
    )

    def __init__(self, cycle: RequestResponseCycle) -> None:
        """Take the place of the transport to which ``cycle`` writes."""
        self._cycle: RequestResponseCycle | None = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._head: bytes | None = None
        self._has_written = False
        self._flush: asyncio.Handle | None = None
        self._write: Callable[[bytes], None] = cycle.transport.write
        self._is_chunked = False
        self._on_gone: Callable[[], Any] | None = None
        self.is_gone = False
        """Whether the connection was lost before the answer was complete."""
        cycle.transport = self  # type: ignore[assignment]

    # --- for uvicorn, as a transport ---------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Write, but keep the first bytes back until the next ones come, or the event loop's next
        iteration."""
        if not self._has_written:
            self._has_written, self._head = True, data
            self._flush = asyncio.get_running_loop().call_soon(self._write_head)
        elif self._head is None:
            self._write(data)
        else:
            head, self._head = self._head, None
            self._write(head + data)

    def close(self) -> None:
        self._write_head()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @property
    def keeps_head(self) -> bool:
        """Whether the answer's first bytes are kept back."""
        return self._head is not None

    def _write_head(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._write(head)

    # --- for the answer ----------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the answer's start was sent."""
        return self._cycle is None or self._cycle.response_started

    @property
    def is_slow(self) -> bool:
        """Whether the next part has to wait until the client has read more."""
        return self._flow.write_paused

    @property
    def has_whole_body(self) -> bool:
        """Whether the request's body has arrived to its end."""
        return self._cycle is not None and not self._cycle.more_body

    def has_taken_body(self) -> None:
        """Note that nothing of the body is left to read.

        uvicorn stops reading while much of a body waits, and reads on when it is asked for more. Nobody asks
        now, and a client that goes would not be noticed."""
        if self._cycle is not None:
            self._flow.resume_reading()

    def write_part(self, data: bytes) -> bool:
        """Write a part of an answer without waiting, once the answer's start is sent. Return False, and write
        nothing, if the client reads too slowly or the answer is not sent in chunks."""
        if self._flow.write_paused or not (self._is_chunked or self._may_chunk()):
            return False
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _may_chunk(self) -> bool:
        self._is_chunked = self.is_gone or (self._cycle is not None and bool(self._cycle.chunked_encoding))
        return self._is_chunked

    def when_gone(self, call: Callable[[], Any] | None) -> None:
        """Call ``call`` once if the connection is lost before the answer is complete. None: call nothing any
        more."""
        self._on_gone = call

    def answered(self) -> None:
        """Note that the answer is complete."""
        self._release()

    def lost(self) -> None:
        """Note that the connection is lost."""
        if self._cycle is not None:
            self.is_gone, self._head = True, None
            call = self._on_gone
            self._release()
            if call is not None:
                call()

    def put_into(self, scope: Scope) -> None:
        scope[_IN_SCOPE] = self

    def _release(self) -> None:
        self._write_head()
        self._cycle = self._on_gone = None
        self._is_chunked = False
        self._write = _nowhere
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None


def _nowhere(data: bytes) -> None:
    """Write nothing."""


def client_end_of(scope: Scope) -> ClientEnd:
    end: ClientEnd = scope[_IN_SCOPE]
    return end
