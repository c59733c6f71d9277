"""The end of a router's process: the router takes no new requests, while requests in progress continue."""

from __future__ import annotations

import time

from wire.errors import UnavailableError


class Drain:
    """Knows whether the router is about to stop, and how many requests it still has to wait for."""

    def __init__(self) -> None:
        self.began_s: float | None = None
        """When the drain began, by the monotonic clock; None: it has not begun."""
        self.num_running = 0

    @property
    def has_begun(self) -> bool:
        return self.began_s is not None

    def begin(self) -> None:
        """Begin the drain. A signal handler may call this."""
        if self.began_s is None:
            self.began_s = time.monotonic()

    def refuse(self) -> None:
        """Raise :class:`UnavailableError` once the drain has begun, so that clients go elsewhere."""
        if self.began_s is not None:
            raise UnavailableError.told(
                "this router is about to stop: send the request again, and another router will take it"
            )

    def is_over(self, grace_s: float) -> bool:
        """Whether the drain has begun and nothing runs any more, or ``grace_s`` have passed since it
        began."""
        return self.began_s is not None and (
            not self.num_running or time.monotonic() - self.began_s >= grace_s
        )
