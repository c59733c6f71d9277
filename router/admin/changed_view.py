"""What has been changed as the admin API shows it, with a warning if that will not last."""

from __future__ import annotations

from router.admin.config_view import ConfigView
from router.admin.worker_view import WorkerView


class ChangedWorkerView(WorkerView):
    warning: str
    """Why changes hold, but would be lost if the router started again now; empty if they would not."""

    @classmethod
    def with_warning(cls, view: WorkerView, warning: str) -> ChangedWorkerView:
        return cls(**dict(view), warning=warning)


class ChangedConfigView(ConfigView):
    warning: str
    """Why changes hold, but would be lost if the router started again now; empty if they would not."""

    @classmethod
    def with_warning(cls, view: ConfigView, warning: str) -> ChangedConfigView:
        return cls(**dict(view), warning=warning)
