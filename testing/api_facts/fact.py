"""One fact: a field of an endpoint, a value, and whether a request with it is answered or refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WORKS = "works"
INVALID = "400 invalid_value"


@dataclass(frozen=True)
class Fact:
    name: str
    """The field, and behind a colon what is special about the value."""
    value: Any
    outcome: str = WORKS
    """:data:`WORKS`, or status and code of the error."""
    beside: dict[str, Any] = field(default_factory=dict)
    """Further fields, without which this one says nothing."""

    @property
    def field(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Endpoint:
    """The facts of one endpoint. They hold for one official client."""

    path: str
    client: str
    needed: dict[str, Any]
    """The fields that each request has, beside the model."""
    facts: tuple[Fact, ...]

    def request(self, fact: Fact, model: str) -> dict[str, Any]:
        """Returns the fields of a request that tests ``fact``."""
        return {"model": model} | self.needed | fact.beside | {fact.field: fact.value}
