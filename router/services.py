"""What the endpoints of one router share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from fastapi import Request

from router.admission import Admission
from router.chat_template import ChatTemplate
from router.config import RouterConfig
from router.metrics import Metrics
from router.sampling_defaults import SamplingDefaults
from router.server_pool import ServerPool
from router.tokenizer import Tokenizer
from wire.errors import UnavailableError


@dataclass(frozen=True)
class Services:
    config: RouterConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: SamplingDefaults
    pool: ServerPool
    metrics: Metrics
    admission: Admission
    created: int
    """When this router started, in seconds since 1970."""

    @property
    def max_model_len(self) -> int | None:
        """None until a server has said it."""
        try:
            return self.pool.limits().max_model_len
        except UnavailableError:
            return None


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)
