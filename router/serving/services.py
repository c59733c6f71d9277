"""The objects that all endpoints of a router share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from fastapi import Request

from router.access.api_keys import ApiKeys
from router.access.credentials import Credentials
from router.access.key_file import KeyFile
from router.audit.audit_log import Audit
from router.config import LiveConfig, RouterConfig
from router.fleet.absence import Absence, AbsenceLog
from router.fleet.server_pool import ServerPool
from router.http.drain import Drain
from router.models.catalog import ModelCatalog
from router.models.grammar_checker import GrammarChecker
from router.observe.last_minute import LastMinute
from router.observe.metrics import Metrics
from router.observe.request_log import RequestLog
from router.quota.quota import Quota
from router.serving.inbox import Backlog
from router.serving.slice_lane import SliceLane
from telemetry.loop_lag import LoopLag

if TYPE_CHECKING:
    from router.kubernetes.pod_watch import PodWatch
    from telemetry.otel import Tracing


KEYS_A_LINE = 100
"""How many keys one line of the audit log tells of. Longer lists would be cut."""


@dataclass(frozen=True)
class Services:
    settings: LiveConfig
    models: ModelCatalog
    pool: ServerPool
    metrics: Metrics
    drain: Drain
    key_file: KeyFile | None
    """None: there are no API keys."""
    credentials: Credentials
    """Who may do what."""
    audit: Audit
    quota: Quota
    grammars: GrammarChecker
    requests: RequestLog
    backlog: Backlog
    slices: SliceLane
    lag: LoopLag
    recent: LastMinute
    created: int
    """When this router started, in seconds since 1970."""
    tracing: Tracing | None = None
    """None: this router exports no traces."""
    pods: PodWatch | None = None
    """None: this router does not look for servers that are pods."""

    absence_log: AbsenceLog = field(default_factory=AbsenceLog)

    @property
    def process(self) -> int:
        """The index of this process among those that share the port; 0 if it is alone."""
        return 0 if self.config.place is None else self.config.place.index

    def keys_changed(self, before: ApiKeys, after: ApiKeys) -> None:
        """Note that the file of API keys has changed. One of several processes does. Many changes have
        several lines, since a line's length is limited."""
        if self.process == 0:
            gone = sorted(before.described() - after.described())
            come = sorted(after.described() - before.described())
            for start in range(0, max(1, len(gone), len(come)), KEYS_A_LINE):
                part = slice(start, start + KEYS_A_LINE)
                self.audit.note("keys_changed", before=gone[part], after=come[part])

    @property
    def absence(self) -> Absence | None:
        """Why no request of any model can be served; None if requests of at least one model can be served."""
        absence = self.pool.not_ready_reason()
        if absence is None or self.pods is None or not self.pods.problem:
            return absence
        return replace(absence, detail=f"{absence.detail}; pods can't be followed: {self.pods.problem}")

    @property
    def leaves_requests_to_another_release(self) -> bool:
        """Whether this router, which has not been ready yet, should stay unready because most decode servers
        speak another protocol version. Such a router has come in the midst of a rollout: once it is ready, a
        router of the other release ends, and that router's servers are of no more use."""
        return self.pods is not None and not self.absence_log.has_been_ready and self.pool.is_outnumbered

    @property
    def has_short_absence(self) -> bool:
        """Whether, for at least one model, requests are served now or wait for servers that may be back soon.
        If so, clients should stay with this router."""
        are_short = [model.hold.is_short for _, model in self.models]  # a list: any() must not skip a hold
        return any(are_short)

    @property
    def config(self) -> RouterConfig:
        """The current settings. Some of them may change while the router runs."""
        return self.settings.current


def services_of(request: Request) -> Services:
    return cast(Services, request.scope["app"].state.services)
