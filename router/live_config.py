"""The settings in force: those of the start, and what was changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from router.config import RouterConfig
from wire.errors import ConfigError, InvalidRequestError

CHANGEABLE = (
    "prefill_policy",
    "decode_policy",
    "session_header",
    "max_requests_in_flight",
    "max_queue",
    "hold_s",
    "max_choices",
    "request_timeout_s",
)
"""Fields of :class:`RouterConfig` that may change while the router runs."""


class LiveConfig:
    """Whoever keeps something that is made of a setting is told of changes; all others read it each time."""

    def __init__(self, config: RouterConfig) -> None:
        self.current = config
        self._listeners: list[Callable[[RouterConfig], None]] = []

    def on_change(self, tell: Callable[[RouterConfig], None]) -> None:
        self._listeners.append(tell)

    def change(self, values: Mapping[str, Any]) -> None:
        """All of them or none. Raises :class:`InvalidRequestError` for what could not be a flag's value."""
        try:
            self.current = with_changes(self.current, values)
        except ConfigError as error:
            raise InvalidRequestError(f"the settings stay as they were: {error.message}") from error
        for tell in self._listeners:
            tell(self.current)


def with_changes(config: RouterConfig, values: Mapping[str, Any]) -> RouterConfig:
    """Raises :class:`ConfigError` for a value that can't work or a name not in :data:`CHANGEABLE`."""
    for name in values:
        if name not in CHANGEABLE:
            raise ConfigError(f"{name!r} can't be changed while the router runs: {', '.join(CHANGEABLE)} can")
    return replace(config, **values)


assert set(CHANGEABLE) <= {field.name for field in fields(RouterConfig)}
