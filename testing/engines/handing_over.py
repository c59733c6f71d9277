"""Two engines of a small model, one of which prefills for the other."""

from __future__ import annotations

import random

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from testing.engines.sanitizing import SANITIZE
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams

MODEL_VOCAB = 300
NUM_TOKENS = 24


def make_engine(model_dir, role, **settings):
    settings = {"max_num_seqs": 8, "max_batch_tokens": 64, "cache_memory_bytes": 64 << 20, **settings}
    settings.setdefault("sanitize", SANITIZE)
    return Engine(EngineConfig(model_dir, role, device="cpu", **settings))


def greedy(name, tokens, max_tokens=NUM_TOKENS, ticket=None):
    return Request(name, list(tokens), SamplingParams(max_tokens=max_tokens, temperature=0), ticket=ticket)


def run(engine, requests=()):
    """Run until all requests have ended; return tokens by request id."""
    for request in requests:
        engine.add(request)
    tokens = {request.request_id: [] for request in requests}
    while not (result := engine.step()).did_nothing:
        for output in result.outputs:
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def prefill(source, tokens, name):
    """Prefill a prompt and return its ticket."""
    request = Request(name, list(tokens), params=None)
    source.add(request)
    while name not in source.scheduler.held:
        source.step()
    num_tokens, block_ids = len(tokens) - 1, tuple(request.memory.block_ids)
    digests = source.digests(request.request_id)
    return Ticket(name, 0, 0, "h:1", "i", num_tokens, block_ids, request.memory.state_slot, 1.0, digests)


def admit(sink, tokens, ticket):
    """Admit a request to the decode engine; it waits for its transfer."""
    request = greedy(ticket.request_id, tokens, ticket=ticket)
    sink.add(request)
    assert sink.step().to_transfer == [request]
    return request


def copy(source, sink, request):
    """Do what a transfer does: copy the blocks and the slot that the ticket names, except those that the sink
    has cached."""
    ticket = request.ticket
    blocks = list(zip(ticket.block_ids, request.memory.block_ids, strict=False))
    for theirs, ours in blocks[len(request.memory.nodes) :]:
        sink.caches.kv[ours] = source.caches.kv[theirs]
    sink.caches.state[request.memory.state_slot] = source.caches.state[ticket.state_slot]


def hand_over(source, sink, tokens, name="handed"):
    """Prefills on one engine, copies what the ticket names, and admits on the other."""
    request = admit(sink, tokens, prefill(source, tokens, name))
    copy(source, sink, request)
    source.release(name)
    assert sink.transferred(request, error=None, settled=True) == []
    return request


def assert_all_free(engine):
    """Assert that only the prefix cache owns anything; it gives its blocks up on demand."""
    owned = engine.scheduler.owned
    assert owned.cache.num_available_blocks == owned.blocks.capacity
    assert owned.cache.num_available_slots == owned.slots.capacity


def prompts(count, seed=0, low=2, high=150):
    choose = random.Random(seed)
    return [
        [choose.randrange(5, MODEL_VOCAB) for _ in range(choose.randint(low, high))] for _ in range(count)
    ]
