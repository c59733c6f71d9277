"""A router that finds scripted servers as pods of a Kubernetes API over HTTP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.config import PodDiscovery
from router.kubernetes import reflector
from router.kubernetes.cluster import Deadlines
from testing.deploy.kubernetes_api import NAMESPACE, running_api
from testing.router.scripted_servers import saying


@pytest.fixture
async def api():
    async with running_api() as running:
        yield running


@pytest.fixture
def deadlines(monkeypatch):
    """Sets deadlines of routers that are started afterwards."""

    def set_to(**seconds):
        monkeypatch.setattr(reflector, "Deadlines", lambda: replace(Deadlines(), **seconds))

    return set_to


class Cloud:
    """A stack whose servers are pods: each is found once a test says that it is one."""

    def __init__(self, stack, api):
        self.stack = stack
        self.api = api

    @property
    def pool(self):
        return self.stack.services.pool

    @property
    def pods(self):
        return self.stack.services.pods

    def add(self, name, server, **pod):
        role = "prefill" if server in self.stack.prefill else "decode"
        return self.api.create_pod(name, role=role, port=server.port, **pod)

    def workers(self):
        return {worker.address: worker for worker in self.pool.workers()}

    def in_use(self):
        """Addresses that new requests may go to."""
        return {
            worker.address
            for worker in self.pool.workers()
            if worker.info is not None and not worker.drain.is_draining
        }


@pytest.fixture
async def make_cloud(make_stack, api, tmp_path):
    async def make(*, start=None, namespace=NAMESPACE, **config):
        """``start``: called before the router is."""
        pods = PodDiscovery(namespace, kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
        if start is not None:
            start(api)
        stack = await make_stack(pods=pods, prefill_addresses=(), decode_addresses=(), ready=False, **config)
        for server in stack.decode:
            server.script = saying([300, 301])
        return Cloud(stack, api)

    return make
