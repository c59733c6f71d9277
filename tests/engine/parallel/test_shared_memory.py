"""Ranks that can't share memory say so, and exchange messages."""

import os

import pytest
import torch.distributed as dist

from engine.parallel.shared_memory import SharedMemory
from engine.parallel.tensor_parallel import leave
from testing.conditions import PROMPT_S


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield None
    leave()


def test_a_system_that_refuses_is_named(group, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("not on this system")

    monkeypatch.setattr(os, "memfd_create", refuse)
    number = len(os.listdir("/proc/self/fd"))
    assert SharedMemory.meet(0, 1, None, PROMPT_S) is None
    assert "in messages, not in shared memory: not on this system" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == number


def test_descriptors_are_closed_with_the_transport(group):
    SharedMemory.meet(0, 1, None, PROMPT_S)
    number = len(os.listdir("/proc/self/fd"))
    shared = SharedMemory.meet(0, 1, None, PROMPT_S)
    del shared
    assert len(os.listdir("/proc/self/fd")) == number
