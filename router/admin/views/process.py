"""One router process as the admin API shows it, and all that it tells its siblings."""

from __future__ import annotations

import os

from pydantic import BaseModel

from router.admin.views.config import ConfigView
from router.admin.views.key import KeyView, key_views
from router.admin.views.missing import MissingProcess
from router.admin.views.model import ModelView, model_views
from router.admin.views.request import RequestView
from router.admin.views.stats import Counts
from router.admin.views.worker import WorkerView, worker_views
from router.serving.services import Services


class ProcessView(BaseModel):
    process: int
    """Its index, from 0."""
    pid: int
    started_at: int
    """When it started, in seconds since 1970."""
    event_loop_lag_s: float
    """How late its event loop was at worst in the last seconds."""
    in_flight: int
    queued: int

    @classmethod
    def of(cls, services: Services) -> ProcessView:
        return cls(
            process=services.process,
            pid=os.getpid(),
            started_at=services.created,
            event_loop_lag_s=round(services.lag.worst_s, 3),
            in_flight=services.requests.num_in_flight,
            queued=services.requests.num_queued,
        )


class ProcessesView(BaseModel):
    """The router processes that share this port."""

    processes: list[ProcessView]
    missing: list[MissingProcess]
    """Processes that did not answer in time. Their requests and figures are not in any answer."""


class ProcessReport(BaseModel):
    """Everything that one process knows, for the process that was asked."""

    about: ProcessView
    workers: list[WorkerView]
    counts: Counts
    config: ConfigView
    warning: str
    """Why operators' changes would be lost if this process restarted now. Empty if they would not be."""
    requests: list[RequestView]
    keys: list[KeyView]
    models: list[ModelView]
    problem: str
    """Why this process can serve no request; empty if it can."""

    @classmethod
    def of(cls, services: Services, warning: str, num_requests: int) -> ProcessReport:
        now_s, absence = services.recent.now_s, services.absence
        records = services.requests.newest(num_requests)
        return cls(
            about=ProcessView.of(services),
            workers=worker_views(services),
            counts=Counts.of(services),
            config=ConfigView.of(services),
            warning=warning,
            requests=[RequestView.of(one, now_s, services.process) for one in records],
            keys=key_views(services),
            models=model_views(services),
            problem="" if absence is None else absence.detail,
        )
