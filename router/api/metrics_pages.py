"""The pages of ``/metrics``: of this process, and of all processes on its port."""

from __future__ import annotations

from functools import partial

from starlette.datastructures import State

from router.api.shared_page import SharedPage
from router.observe.sibling_metrics import merged, metrics_of_siblings
from router.serving.services import Services


class MetricsPages:
    """Each page exists with and without the figures of single API keys."""

    def __init__(self, state: State) -> None:
        """``state`` of the application has the services once they run."""
        self._state = state
        both = (False, True)
        self._of_one = {with_keys: SharedPage(partial(self._build_one, with_keys)) for with_keys in both}
        self._of_all = {with_keys: SharedPage(partial(self._build_all, with_keys)) for with_keys in both}

    async def of_one(self, client: str, *, with_keys: bool) -> bytes:
        """Return the metrics of this process, for ``client``."""
        return await self._of_one[with_keys].get(client)

    async def of_all(self, client: str, *, with_keys: bool) -> bytes:
        """Return the metrics of all processes on this port, and what servers count."""
        return await self._of_all[with_keys].get(client)

    async def _build_one(self, with_keys: bool) -> bytes:
        services: Services = self._state.services
        for role, num in services.pool.num_connected().items():
            services.metrics.servers.labels(role).set(num)
        for role, num in services.pool.num_configured().items():
            services.metrics.configured.labels(role).set(num)
        gates = {model.name: (model.gate, model.hold) for _, model in services.models}
        services.metrics.gates.update(gates)
        services.metrics.router_view.update(services.pool.assignments())
        return services.metrics.of_router(with_keys=with_keys)

    async def _build_all(self, with_keys: bool) -> bytes:
        services: Services = self._state.services
        services.metrics.server_stats.update(*services.pool.stats())
        own, place = await self._build_one(with_keys), services.config.place
        if place is not None:
            others = await metrics_of_siblings(place, self._state.own_ports.called, with_keys=with_keys)
            own = merged({place.index: own.decode(), **others})
        return own + services.metrics.of_servers()
