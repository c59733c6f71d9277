"""Every thread of a prefill and a decode server makes its GPU current before it uses the GPU.

CUDA's current device and context belong to a thread. Without them, kernels run on GPU 0 whatever their
tensors are on, and UCX silently leaves out ``cuda_ipc`` (vllm-project/vllm 36475, openucx/ucx 11240).
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import torch

from decode_server.config import DecodeConfig
from decode_server.service import DecodeService
from engine.config import EngineConfig
from kernels.gpu.current_device import use_device
from prefill_server.config import PrefillConfig
from prefill_server.service import PrefillService
from telemetry.start_up import StartUp
from testing.device_audit import DeviceAudit, forget_to_use_device
from wire.codec import encode
from wire.messages.generation import PrefillReply, PrefillRequest, StepNews, Submit
from wire.messages.sampling_params import SamplingParams
from wire.rpc import decode_stream_reply
from wire.server import GrpcServer

PROMPT = tuple(range(5, 45))
GREEDY = SamplingParams(max_tokens=4, temperature=0)


def test_a_gpu_becomes_the_thread_s_and_a_cpu_needs_nothing(monkeypatch):
    made_current = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    use_device(torch.device("cpu"))
    use_device(torch.device("cuda:1"))
    assert made_current == [torch.device("cuda:1")]


class Server:
    """A server in this process, made by the calling thread as by a server process's main thread."""

    def __init__(self, make_service, config, role, model, incarnation):
        server = GrpcServer("127.0.0.1", 0)
        engine = EngineConfig(model, role, device="cpu", max_num_seqs=2, cache_memory_bytes=64 << 20)
        self.service = make_service(
            config(engine, "127.0.0.1", server.port, "a"), server, incarnation=incarnation, start_up=StartUp()
        )
        self.server = server

    async def start(self):
        self.service.start()
        await self.server.start()

    async def close(self):
        self.server.stop()
        await self.server.wait_until_stopped(partial(asyncio.sleep, 0))
        await self.service.close()


async def prefilled(server, request_id, token_ids, resume=None):
    request = PrefillRequest(request_id, token_ids, resume=resume)
    replies = [reply async for reply in server.service.prefill(request)]
    assert isinstance(replies[-1], PrefillReply)
    return replies[-1].ticket


async def decoded(server, request_id, token_ids, ticket):
    """Returns the tokens, and the ticket of the state that is kept."""
    is_over = asyncio.Event()

    async def requests():
        yield encode(Submit(request_id, token_ids, GREEDY, ticket, keeps_state=True))
        await is_over.wait()

    tokens, kept = [], None
    async for data in server.service.stream(requests(), SimpleNamespace()):
        message = decode_stream_reply(data)
        for output in message.outputs if isinstance(message, StepNews) else ():
            assert output.error is None, output.error
            tokens += output.token_ids
            kept = output.ticket or kept
            if output.finish_reason is not None:
                is_over.set()
    return tokens, kept


async def serve_two_turns(audit, model):
    """Hands a prompt over, and hands the kept state of its answer back for the next turn."""
    with audit.operations():
        prefill = Server(PrefillService, PrefillConfig, "prefill", model, "aa")
        decode = Server(DecodeService, DecodeConfig, "decode", model, "bb")
    await prefill.start()
    await decode.start()
    try:
        ticket = await prefilled(prefill, "turn-1", PROMPT)
        tokens, kept = await decoded(decode, "turn-1", PROMPT, ticket)
        assert kept is not None
        longer = (*PROMPT, *tokens, *PROMPT)
        ticket = await prefilled(prefill, "turn-2", longer, resume=kept)
        await decoded(decode, "turn-2", longer, ticket)
        assert prefill.service._exchange.stats().transfer_bytes > 0
        assert decode.service._exchange.stats().transfer_bytes > 0
    finally:
        await decode.close()
        await prefill.close()


async def test_each_thread_makes_its_gpu_current_before_it_uses_it(monkeypatch, bundled_model):
    audit = DeviceAudit(monkeypatch)
    await serve_two_turns(audit, bundled_model)
    assert audit.seen >= {"MainThread", "engine", "transfer"}
    assert audit.faults == {}


async def test_the_audit_finds_every_thread_that_forgets_to(monkeypatch, bundled_model):
    forget_to_use_device(monkeypatch)
    audit = DeviceAudit(monkeypatch)
    await serve_two_turns(audit, bundled_model)
    assert audit.faults.keys() >= {"MainThread", "engine", "transfer"}
    assert any(name.startswith("asyncio") for name in audit.faults), "the thread that closes NIXL's agent"
