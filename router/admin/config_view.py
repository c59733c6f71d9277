"""The router's settings as the admin API shows and takes them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from router.live_config import CHANGEABLE
from router.policies.policy_names import PolicyName
from router.services import Services


class ConfigView(BaseModel):
    """Settings that may change while the router runs, by the names of their flags."""

    prefill_policy: PolicyName
    decode_policy: PolicyName
    session_header: str
    """Requests with equal values of this header go to the same servers; empty: none do."""
    max_requests_in_flight: int
    max_queue: int
    hold_s: float
    max_choices: int
    request_timeout_s: float

    @classmethod
    def of(cls, services: Services) -> ConfigView:
        return cls(**{name: getattr(services.config, name) for name in CHANGEABLE})


class ConfigChange(BaseModel):
    """What to change; what is not named stays as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prefill_policy: PolicyName | None = None
    decode_policy: PolicyName | None = None
    session_header: Annotated[str, Field(max_length=256)] | None = None
    max_requests_in_flight: int | None = None
    max_queue: int | None = None
    hold_s: Annotated[float, Field(allow_inf_nan=False)] | None = None
    max_choices: int | None = None
    request_timeout_s: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @property
    def values(self) -> dict[str, Any]:
        """By name, without those that are not given."""
        return self.model_dump(exclude_none=True)
