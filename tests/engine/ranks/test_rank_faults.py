"""A rank whose GPU fails, by a fake: it says so in one line, and its server ends for the same reason."""

import logging
import queue

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.ranks.processes import RankProcesses
from testing.conditions import TIMEOUT_S
from testing.fleets.injected import LOST_CONTEXT
from wire.errors import DeviceFaultError


def lose_context(_engine, _link):
    raise torch.AcceleratorError(LOST_CONTEXT)


def test_a_rank_whose_gpu_fails_ends_the_server_with_the_same_fault(models, caplog):
    caplog.set_level(logging.INFO)
    faults = queue.SimpleQueue()
    config = EngineConfig(
        models["dense"], "both", device="cpu", tensor_parallel=2, cache_memory_bytes=64 << 20, num_threads=1
    )
    ranks = RankProcesses(config, lose_context, on_fatal=faults.put)
    try:
        Engine(config, ranks.join().tp)
        fault = faults.get(timeout=TIMEOUT_S)
    finally:
        ranks.stop()
    assert isinstance(fault, DeviceFaultError)
    assert fault.message == "rank 1 has ended with exit code 71"
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert said[0].startswith("rank 1: the GPU failed: an illegal memory access was encountered")
    assert not any("Traceback" in line for line in said)
