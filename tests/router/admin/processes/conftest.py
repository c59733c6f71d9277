"""Several routers in one event loop, in front of scripted servers."""

from contextlib import AsyncExitStack

import pytest

from router.admin.processes import channel
from router.config import ModelSource, RouterConfig
from testing.conditions import TIMEOUT_S, until
from testing.router.admin_calls import TOKEN
from testing.router.router_processes import siblings
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import ScriptedDecode, ScriptedPrefill, saying, server_info
from testing.router.tokenizers import write_model_dir


class Stack:
    """Three routers that know one prefill and two decode servers."""

    def __init__(self, routers, prefill, decode):
        self.routers = routers
        self.prefill = prefill
        self.decode = decode

    def __getitem__(self, index):
        return self.routers[index]

    async def until_connected(self, index):
        pool = self.routers[index].app.state.services.pool
        await until(lambda: pool.num_connected() == pool.num_configured())


@pytest.fixture
async def make_siblings(tmp_path, monkeypatch):
    """Return routers that wait for each other as long as a test waits. They share one process: if a busy
    machine held it up for two seconds, all of them would be late at once."""
    monkeypatch.setattr(channel, "TIMEOUT_S", TIMEOUT_S)
    async with AsyncExitStack() as exits:

        async def make(count=3, **settings):
            prefill = [ScriptedPrefill(server_info("prefill"))]
            decode = [ScriptedDecode(server_info("decode"), script=saying([300, 301])) for _ in range(2)]
            for server in (*prefill, *decode):
                exits.push_async_callback(server.stop)
                await server.start()
            (tmp_path / "token").write_text(TOKEN)
            config = RouterConfig(
                models=(ModelSource(MODEL, write_model_dir(tmp_path / "model")),),
                prefill_addresses=tuple(server.address for server in prefill),
                decode_addresses=tuple(server.address for server in decode),
                admin_token_file=tmp_path / "token",
                probe_interval_s=0.1,
                **settings,
            )
            stack = Stack(await exits.enter_async_context(siblings(config, count)), prefill, decode)
            for index in range(count):
                await stack.until_connected(index)
            return stack

        yield make
