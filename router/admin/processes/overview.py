"""What all router processes on this port know, as the one of them that was asked shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fastapi import Request

from router.admin.views.config import ChangedConfigView, ConfigView
from router.admin.views.key import KeyView, merged_keys
from router.admin.views.missing import MissingProcess
from router.admin.views.model import ModelView, merged_models
from router.admin.views.pool import PoolsView
from router.admin.views.process import ProcessesView, ProcessReport
from router.admin.views.request import RequestView, newest
from router.admin.views.stats import StatsView
from router.admin.views.worker import WorkerView, merged_workers
from router.serving.services import Services

if TYPE_CHECKING:
    from router.admin.processes.channel import Siblings


def joined(warnings: list[str]) -> str:
    """Join the processes' warnings: mostly they are all the same."""
    return "; ".join(dict.fromkeys(filter(None, warnings)))


@dataclass(frozen=True)
class Overview:
    """The reports of all processes that answered, the own one first."""

    reports: list[ProcessReport]
    missing: list[MissingProcess]

    @property
    def processes(self) -> ProcessesView:
        return ProcessesView(
            processes=sorted((one.about for one in self.reports), key=lambda about: about.process),
            missing=self.missing,
        )

    @property
    def workers(self) -> list[WorkerView]:
        return merged_workers([one.workers for one in self.reports])

    @property
    def pools(self) -> PoolsView:
        return PoolsView.of(self.workers, self.reports[0].problem, self.missing)

    @property
    def config(self) -> ChangedConfigView:
        warning = joined([one.warning for one in self.reports])
        return ChangedConfigView.with_warning(self.reports[0].config, warning, self.missing)

    @property
    def stats(self) -> StatsView:
        return StatsView.of([one.counts for one in self.reports], self.missing)

    @property
    def keys(self) -> list[KeyView]:
        return merged_keys(key for one in self.reports for key in one.keys)

    @property
    def models(self) -> list[ModelView]:
        return merged_models(model for one in self.reports for model in one.models)

    def requests(self, limit: int) -> list[RequestView]:
        return newest((request for one in self.reports for request in one.requests), limit)


class Processes:
    """This process and its siblings. ``warning`` returns why operators' changes would be lost."""

    def __init__(self, services: Services, warning: Callable[[], str], siblings: Siblings | None) -> None:
        self._services = services
        self._warning = warning
        self.siblings = siblings

    def own_report(self, num_requests: int = 0) -> ProcessReport:
        return ProcessReport.of(self._services, self._warning(), num_requests)

    @property
    def own_config(self) -> ConfigView:
        return ConfigView.of(self._services)

    async def look(self, num_requests: int = 0) -> Overview:
        """Ask all processes, for at most ``num_requests`` requests each."""
        if self.siblings is None:
            return Overview([self.own_report(num_requests)], [])
        told, missing = await self.siblings.ask_all("GET", f"/report?limit={num_requests}", ProcessReport)
        return Overview([self.own_report(num_requests), *told.values()], missing)


def processes_of(request: Request) -> Processes:
    return cast(Processes, request.app.state.processes)
