"""Blocks and states come back from pages of host memory bit for bit."""

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.memory.cached_start import HostCopy
from engine.memory.caches import Caches
from engine.memory.host_tier import HostMemory
from engine.models import read_config
from engine.schedule.host_pages import HostPages
from wire.errors import CapacityError

BLOCK = 4


def make(bundled_model, *, num_pages=40, **changes):
    spec = replace(EngineConfig(bundled_model, "both").demand(read_config(bundled_model)).spec, **changes)
    caches = Caches(spec, num_blocks=9, num_slots=5, block_size=BLOCK, device="cpu")
    caches.kv_words.random_(-128, 128)
    caches.state.random_(0, 256)
    page_bytes = spec.block_bytes(BLOCK) or spec.slot_bytes
    memory = HostMemory.within(
        num_pages * page_bytes, block_bytes=spec.block_bytes(BLOCK), slot_bytes=spec.slot_bytes
    )
    return caches, HostPages(caches, memory), memory


@pytest.mark.parametrize("changes", [{}, {"kv_dtype": torch.float8_e4m3fn}, {"ssm_dtype": torch.bfloat16}])
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_what_was_demoted_is_promoted_to_other_blocks_and_another_slot(
    bundled_model, changes, is_scattered, is_gathered
):
    """``is_gathered``: blocks are gathered first, as on a GPU."""
    caches, pages, memory = make(bundled_model, num_pages=400, **changes)
    if is_gathered:
        pages._on_cpu = None
    free = list(range(1, memory.num_pages + 1))
    if is_scattered:
        free = free[::-2] + free[-2::-2]
    block_pages, state_pages = tuple(free[:3]), tuple(free[3 : 3 + memory.state_pages])
    kv, state = caches.kv_words.clone(), caches.state.clone()
    pages.save([HostCopy((2, 7, 3), block_pages, 4, state_pages)])
    caches.kv_words.fill_(0)
    caches.state.fill_(0)
    pages.restore([HostCopy((5, 6), block_pages[1:], 1, state_pages)])
    assert torch.equal(caches.kv_words[[5, 6]], kv[[7, 3]])
    assert torch.equal(caches.state[1], state[4])
    assert not caches.kv_words[[0, 1, 2, 3, 4, 7, 8]].any()
    assert not caches.state[[0, 2, 3, 4]].any()


@pytest.mark.parametrize("absent", ["attn_layers", "mamba_layers"])
def test_a_model_with_one_part_has_pages_of_that_part(bundled_model, absent):
    caches, pages, memory = make(bundled_model, **{absent: 0})
    kv, state = caches.kv_words.clone(), caches.state.clone()
    copy = HostCopy((), (), 2, (3,)) if absent == "attn_layers" else HostCopy((2, 3), (5, 1))
    assert len(copy.state_pages) == memory.state_pages
    pages.save([copy])
    caches.kv_words.fill_(0)
    caches.state.fill_(0)
    pages.restore([copy])
    assert torch.equal(caches.kv_words[[2, 3]], kv[[2, 3]])
    assert torch.equal(caches.state[2], state[2])


def test_a_host_that_has_not_so_much_memory_is_told_so(bundled_model):
    caches, _, memory = make(bundled_model)
    with pytest.raises(CapacityError, match=r"`host_cache_bytes` .* can't give so much memory; lower it"):
        HostPages(caches, replace(memory, num_pages=1 << 50))


def test_the_copies_of_one_plan_may_have_blocks_or_a_state_or_both(bundled_model):
    caches, pages, memory = make(bundled_model, num_pages=400)
    size = memory.state_pages
    states = [tuple(range(first, first + size)) for first in (100, 300, 200)]
    kv, state = caches.kv_words.clone(), caches.state.clone()
    pages.save(
        [
            HostCopy((2, 7), (9, 3), 4, states[0]),
            HostCopy((), (), 1, states[1]),
            HostCopy((5,), (1,)),
            HostCopy((8, 6, 3), (20, 21, 22), 2, states[2]),
        ]
    )
    caches.kv_words.fill_(0)
    caches.state.fill_(0)
    pages.restore(
        [HostCopy((1,), (22,)), HostCopy((4, 2), (9, 1), 3, states[2]), HostCopy((), (), 2, states[1])]
    )
    assert torch.equal(caches.kv_words[[1, 4, 2]], kv[[3, 2, 5]])
    assert torch.equal(caches.state[[3, 2]], state[[2, 1]])
    assert not caches.kv_words[[0, 3, 5, 6, 7, 8]].any()
    assert not caches.state[[0, 1, 4]].any()


def test_a_state_that_does_not_fill_its_last_page_leaves_the_next_page_alone(bundled_model):
    caches, pages, memory = make(bundled_model, num_pages=400)
    pages.memory[:] = 7
    last = memory.state_pages
    pages.save([HostCopy((), (), 4, tuple(range(1, last + 1)))])
    filled = caches.state.shape[1] - (last - 1) * memory.page_bytes
    assert 0 < filled <= memory.page_bytes
    assert (pages.memory[last - 1, filled:] == 7).all()
    assert (pages.memory[last:] == 7).all()
