"""What a router has from its start to its end, whatever happens in between: read before it serves."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from router.config import RouterConfig
from router.drain import Drain
from router.files import Files
from router.membership import Membership
from telemetry.tracing import start_tracing

if TYPE_CHECKING:
    from router.kubernetes.pod_watch import PodWatch
    from telemetry.otel import Tracing


@dataclass(frozen=True)
class Resources:
    """Files, tokenizers and traces of one router."""

    files: Files
    drain: Drain
    make_pod_watch: Callable[[Membership], PodWatch] | None
    tracing: Tracing | None

    @classmethod
    def open(cls, config: RouterConfig) -> Resources:
        """Raises :class:`ConfigError`, and what :meth:`Files.read` raises."""
        make_pod_watch = _pod_watch_maker(config)
        files = Files.read(config)
        tracing = start_tracing(
            "twinfang-router", secrets.token_hex(8), endpoint=config.otlp_endpoint, environment=os.environ
        )
        return cls(files, Drain(), make_pod_watch, tracing)

    async def close(self) -> None:
        self.files.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def _pod_watch_maker(config: RouterConfig) -> Callable[[Membership], PodWatch] | None:
    """What it needs is an extra, imported where it is used only. Raises :class:`ConfigError`."""
    if config.pods is None:
        return None
    from router.kubernetes.cluster import require_service_account
    from router.kubernetes.pod_watch import PodWatch

    if config.pods.kubeconfig is None:
        require_service_account()
    return partial(PodWatch, config.pods, config)
