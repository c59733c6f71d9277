"""Two prefill servers in one process, with engines, gRPC and NIXL: one reads what the other has cached."""

from __future__ import annotations

import random
from contextlib import aclosing, asynccontextmanager

import pytest

from engine.config import EngineConfig
from engine.models import read_config
from prefill_server.config import PrefillConfig
from prefill_server.service import PrefillService
from telemetry.start_up import StartUp
from testing.checkpoints.families import make_family_checkpoint
from testing.conditions import until
from wire.messages.generation import PrefillReply, PrefillRequest, SetDraining
from wire.messages.neighbours import Neighbour
from wire.server import GrpcServer

BLOCK, NUM_TOKENS = 8, 150
SETTINGS = {
    "max_num_seqs": 2,
    "max_batch_tokens": 64,
    "max_model_len": 256,
    "block_size": BLOCK,
    "cached_states": 4,
    "cache_mode": "all",
    "host_cache_bytes": 16 << 20,
    "sanitize": True,
    "neighbour_wait_s": 20.0,
}


class Server:
    """One prefill server."""

    def __init__(self, model_dir, name, **settings):
        settings = {**SETTINGS, **settings}
        config = EngineConfig(model_dir, "prefill", device="cpu", **settings)
        least = config.demand(read_config(model_dir)).min_bytes
        config = EngineConfig(model_dir, "prefill", device="cpu", cache_memory_bytes=4 * least, **settings)
        self.grpc = GrpcServer("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.grpc.port}"
        server_config = PrefillConfig(config, "127.0.0.1", self.grpc.port, "tiny", verify_handoffs="all")
        self.service = PrefillService(server_config, self.grpc, incarnation=name, start_up=StartUp())
        self.figures = self.service.measures.neighbour_cache
        self._num_asked = 0

    async def start(self):
        await self.grpc.start()
        self.service.start()

    async def prefill(self, prompt, neighbour=None, **fields):
        """Computes a prompt. Returns the cached tokens, and the digests of its blocks and state."""
        self._num_asked += 1
        request = PrefillRequest(f"r{self._num_asked}", tuple(prompt), neighbour=neighbour, **fields)
        async with aclosing(self.service.prefill(request)) as answers:
            replies = [answer async for answer in answers]
        reply = replies[-1]
        assert isinstance(reply, PrefillReply)
        await self.service.abandon(type("Message", (), {"request_id": request.request_id}), None)
        return reply.cached_tokens, reply.ticket.unit_digests

    async def stop(self):
        await self.service.close()
        await self.grpc._server.stop(None)


@asynccontextmanager
async def two_servers(model_dir, **settings):
    servers = [Server(model_dir, "a", **settings), Server(model_dir, "b", **settings)]
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()


def prompt_of(seed):
    choose = random.Random(seed)
    return [choose.randrange(6, 150) for _ in range(NUM_TOKENS)]


@pytest.mark.parametrize(
    "family",
    ["nemotron-h", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("mamba-2", "llama"))],
)
async def test_a_prompt_goes_on_from_what_a_neighbour_has_as_from_its_own_cache(tmp_path, family):
    model_dir = make_family_checkpoint(tmp_path / family, family)
    settings = {"cached_states": None} if family == "llama" else {}  # it has no states
    async with two_servers(model_dir, **settings) as (lender, reader):
        prompt = prompt_of(1)
        assert (await lender.prefill(prompt))[0] == 0
        cached, own = await lender.prefill(prompt)
        assert 0 < cached < NUM_TOKENS - 1
        found = await reader.prefill(prompt, Neighbour(lender.address, cached))
        assert found == (cached, own)
        assert (reader.figures.read, lender.figures.lent) == (1, 1)
        assert reader.figures.read_bytes == lender.figures.lent_bytes > 0
        assert await reader.prefill(prompt) == found, "it is here now"
        gone = await reader.prefill(prompt_of(2), Neighbour(lender.address, cached))
        assert gone[0] == 0, "the lender does not have it"
        assert reader.figures.failures == {**dict.fromkeys(reader.figures.failures, 0), "gone": 1}
        await until(lambda: lender.figures.lent_now_bytes == 0, "the loan has ended")


async def test_a_leaving_server_hands_over_what_it_has(tmp_path):
    model_dir = make_family_checkpoint(tmp_path / "nemotron-h", "nemotron-h")
    async with two_servers(model_dir) as (leaving, heir):
        prompts = [prompt_of(seed) for seed in range(10, 13)]
        for prompt in prompts:
            await leaving.prefill(prompt)
        expected = [await leaving.prefill(prompt) for prompt in prompts]
        await leaving.service.set_draining(SetDraining(True, heirs=(heir.address,)))
        assert (await leaving.service.stats()).drain == "draining"
        await until(lambda: not leaving.service._exchange.starts.is_handing_over, "all is offered")
        assert leaving.figures.handed_over == heir.figures.read >= len(prompts)
        await until(lambda: leaving.figures.lent_now_bytes == 0, "the loans have ended")
        assert [await heir.prefill(prompt) for prompt in prompts] == expected
        assert (await leaving.service.stats()).drain == "drained"
