"""Settings as the admin API shows them."""

from __future__ import annotations

from pydantic import BaseModel

from router.admin.views.missing import MissingProcess
from router.config import CHANGEABLE
from router.policies.policy_names import PolicyName
from router.serving.services import Services


class ConfigView(BaseModel):
    """Settings that may change while the router runs. Each field has the name of its flag."""

    prefill_policy: PolicyName
    decode_policy: PolicyName
    session_header: str
    """Requests with equal values of this header go to the same servers. Empty: no header has this effect."""
    max_requests_in_flight: int
    max_queue: int
    hold_s: float
    max_choices: int
    request_timeout_s: float

    @classmethod
    def of(cls, services: Services) -> ConfigView:
        return cls(**{name: getattr(services.config, name) for name in CHANGEABLE})


class ChangedConfigView(ConfigView):
    warning: str
    """Why changes would be lost if the router restarted now, or which router processes do not know them yet.
    They are in effect nevertheless. Empty if there is no such reason."""
    missing: list[MissingProcess]
    """Router processes that did not answer. Each of them gets the settings when it answers again."""

    @classmethod
    def with_warning(cls, view: ConfigView, warning: str, missing: list[MissingProcess]) -> ChangedConfigView:
        return cls(**dict(view), warning=warning, missing=missing)
