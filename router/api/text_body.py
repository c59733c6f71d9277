"""What the bodies of all APIs for text have in common."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from router.access.api_keys import ApiKey
from router.http.openai_errors import shown
from wire.errors import InvalidRequestError, PermissionDeniedError

log = logging.getLogger(__name__)

MAX_PRIORITY = 2**31 - 1


def ranged(least: float, most: float) -> Any:
    """Return a field whose range is shown in /openapi.json. pydantic does not check the range; it is checked
    later, with a message in the form of this project's errors."""
    return Field(default=None, json_schema_extra={"minimum": least, "maximum": most})


class TextBody(BaseModel):
    """The fields that say which model answers, how and when. ``null`` means the default.

    Unknown fields are ignored, as in vLLM, with a line in the debug log.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported but would change the answer, each with the values that change nothing.
    Any other value is refused, because an answer that ignores the value is not what the client asked for."""

    model: str | None = None
    stream: bool | None = None
    priority: int | None = ranged(-MAX_PRIORITY, MAX_PRIORITY)

    def check_extra_fields(self) -> None:
        """Raise :class:`InvalidRequestError` for a field that is known but not supported."""
        extra = self.model_extra or {}
        for name, harmless in self.unsupported.items():
            if name in extra and extra[name] not in harmless:
                raise InvalidRequestError(
                    f"{name} is not supported here, got {shown(extra[name])}: leave it out", param=name
                )
        if ignored := extra.keys() - self.unsupported.keys():
            log.debug("ignored unknown fields of a request: %s", ", ".join(sorted(ignored))[:500])

    def priority_for(self, api_key: ApiKey) -> int:
        """Return the request's priority among waiting requests. A request with a lower number is served
        earlier.

        Raises :class:`PermissionDeniedError` for a priority that this key may not ask for, and
        :class:`InvalidRequestError` for a priority that is out of range.
        """
        earliest = api_key.min_priority
        if self.priority is None:
            return max(0, earliest or 0)
        if abs(self.priority) > MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {shown(self.priority)}",
                param="priority",
            )
        if earliest is not None and self.priority < earliest:
            raise PermissionDeniedError(
                f"priority is {self.priority}; the lowest that API key {api_key.name!r} may ask for is "
                f"{earliest}: send that or more, or leave priority out",
                param="priority",
            )
        return self.priority
