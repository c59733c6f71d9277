"""Host memory that is pinned for copies, on the simulated GPU, which refuses an address that is pinned."""

import gc

import pytest
import torch

from engine.memory.async_copy import check_host_has, pinned_memory
from testing.simulated_gpu.gpu import SimulatedGpu
from wire.errors import CapacityError

NUM_BYTES = 1 << 20


def test_an_address_can_be_pinned_again_once_nobody_has_its_tensor(monkeypatch):
    block = torch.empty(NUM_BYTES, dtype=torch.uint8)
    monkeypatch.setattr("engine.memory.async_copy.host_empty", lambda *_: block.view(-1))
    device = torch.device("cuda", 0)
    with SimulatedGpu():
        first = pinned_memory(NUM_BYTES, device, "host_cache_bytes")
        with pytest.raises(CapacityError, match="`host_cache_bytes` 1048576"):
            pinned_memory(NUM_BYTES, device, "host_cache_bytes")
        del first
        gc.collect()
        assert pinned_memory(NUM_BYTES, device, "host_cache_bytes").data_ptr() == block.data_ptr()


def test_more_than_the_machine_has_is_refused_at_once():
    check_host_has(NUM_BYTES, "host_cache_bytes")
    with pytest.raises(
        CapacityError, match=r"`host_cache_bytes` 1125899906842624: this machine has [\d.]+ GiB"
    ):
        check_host_has(1 << 50, "host_cache_bytes")
