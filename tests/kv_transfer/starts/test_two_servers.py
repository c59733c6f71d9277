"""Two prefill servers in one process, with engines, gRPC and NIXL: one reads what the other has cached."""

from __future__ import annotations

import random
from contextlib import aclosing, asynccontextmanager

import pytest

from engine.config import EngineConfig
from engine.models import read_config
from kv_transfer.starts.hand_over import TAKEN_SHARE
from prefill_server.config import PrefillConfig
from prefill_server.service import PrefillService
from telemetry.start_up import StartUp
from testing.checkpoints.families import make_family_checkpoint
from testing.conditions import until
from twinfang.stack.ports import free_ports
from wire.messages.cache_salt import owner_of_key, salt_of_key
from wire.messages.generation import PrefillReply, PrefillRequest, SetDraining
from wire.messages.neighbours import Neighbour
from wire.messages.purge import PurgePrefixes
from wire.server import GrpcServer

pytestmark = pytest.mark.usefixtures("patient")

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
    "neighbour_wait_s": 60.0,
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
async def two_servers(model_dir, second=None, **settings):
    """``second``: settings of the second server that differ."""
    servers = [Server(model_dir, "a", **settings), Server(model_dir, "b", **{**settings, **(second or {})})]
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


async def test_what_a_server_took_over_is_deleted_for_its_owner(tmp_path):
    model_dir = make_family_checkpoint(tmp_path / "nemotron-h", "nemotron-h")
    salts = [salt_of_key("alice", ""), salt_of_key("bob", "")]
    async with two_servers(model_dir) as (leaving, heir):
        for salt in salts:
            await leaving.prefill(prompt_of(60), cache_salt=salt)
        await leaving.service.set_draining(SetDraining(True, heirs=(heir.address,)))
        await until(lambda: not leaving.service._exchange.starts.is_handing_over, "all is offered")
        num_taken = heir.figures.read
        alice = PurgePrefixes(owner_of_key("alice"))
        assert (await heir.service.purge(alice)).num_starts == num_taken / 2 > 0
        assert (await heir.service.purge(alice)).num_starts == 0
        cached = [(await heir.prefill(prompt_of(60), cache_salt=salt))[0] for salt in salts]
        assert cached[0] == 0 < cached[1]


async def test_a_server_that_stays_takes_a_part_of_its_host_memory_from_one_that_leaves(tmp_path):
    model_dir = make_family_checkpoint(tmp_path / "nemotron-h", "nemotron-h")
    small = {"host_cache_bytes": 2 << 20}
    async with two_servers(model_dir, small) as (leaving, heir):
        for seed in range(20, 32):
            await leaving.prefill(prompt_of(seed))
        await leaving.service.set_draining(SetDraining(True, heirs=(heir.address,)))
        await until(lambda: not leaving.service._exchange.starts.is_handing_over, "all is offered")
        assert 0 < heir.figures.read_bytes <= TAKEN_SHARE * small["host_cache_bytes"]
        assert leaving.figures.handed_over == heir.figures.read
        assert heir.figures.computed == 0
        starts = heir.service._engine.scheduler.owned.cache.tier
        assert 0 < starts.figures.used_bytes <= TAKEN_SHARE * small["host_cache_bytes"]


async def test_a_drain_that_is_taken_back_hands_over_nothing_more(tmp_path):
    model_dir = make_family_checkpoint(tmp_path / "nemotron-h", "nemotron-h")
    async with two_servers(model_dir) as (leaving, heir):
        await leaving.prefill(prompt_of(40))
        nobody = f"127.0.0.1:{free_ports(1)[0]}"
        await leaving.service.set_draining(SetDraining(True, heirs=(nobody,)))
        await leaving.service.set_draining(SetDraining(False))
        assert not leaving.service._exchange.starts.is_handing_over
        await leaving.service.set_draining(SetDraining(True, heirs=(nobody, heir.address)))
        await until(lambda: not leaving.service._exchange.starts.is_handing_over, "nobody is left to ask")
        assert (await leaving.service.stats()).drain == "drained"


@pytest.mark.exhaustive
async def test_a_neighbour_whose_starts_have_another_form_is_a_miss(tmp_path):
    model_dir = make_family_checkpoint(tmp_path / "nemotron-h", "nemotron-h")
    async with two_servers(model_dir, {"mamba_ssm_cache_dtype": "bfloat16"}) as (lender, reader):
        prompt = prompt_of(50)
        await lender.prefill(prompt)
        cached, _ = await lender.prefill(prompt)
        assert (await reader.prefill(prompt, Neighbour(lender.address, cached)))[0] == 0
        assert reader.figures.failures["form"] == 1
        assert lender.figures.lent == 0
        assert (await reader.prefill(prompt_of(51), Neighbour(lender.address, cached)))[0] == 0
        assert sum(reader.figures.failures.values()) == 1, "it is not asked again"
