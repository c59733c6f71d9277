"""The router's settings as the admin API shows them."""

from __future__ import annotations

from pydantic import BaseModel

from router.policies.policy_names import PolicyName
from router.services import Services


class ConfigView(BaseModel):
    prefill_policy: PolicyName
    decode_policy: PolicyName
    max_requests_in_flight: int
    max_choices: int
    request_timeout_s: float

    @classmethod
    def of(cls, services: Services) -> ConfigView:
        config = services.config
        return cls(**{name: getattr(config, name) for name in cls.model_fields})
