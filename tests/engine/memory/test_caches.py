"""Per-layer views address exactly the bytes that the layout names, also where sizes are equal by chance."""

import itertools

import pytest
import torch

from engine.memory.caches import SEGMENT_ALIGNMENT, Caches, CacheSpec
from engine.sanitizer.checksum import Checksums
from engine.sanitizer.poison import Poison
from engine.schedule.host_store import HostStore
from engine.schedule.step_plan import Swap


def make_caches(
    num_blocks=5, num_slots=3, block_size=4, kv_heads=3, attn_layers=2, head_dim=8, mamba_layers=2
):
    spec = CacheSpec(
        attn_layers=attn_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_dtype=torch.float32,
        mamba_layers=mamba_layers,
        conv_channels=20,
        conv_width=4,
        mamba_heads=2,
        mamba_head_dim=5,
        state_size=7,
        conv_dtype=torch.bfloat16,
        ssm_dtype=torch.float32,
    )
    return Caches(spec, num_blocks=num_blocks, num_slots=num_slots, block_size=block_size, device="cpu")


COINCIDENCES = [
    {},
    {"num_blocks": 2},
    {"num_blocks": 2, "block_size": 2, "kv_heads": 2, "attn_layers": 2, "head_dim": 2},
    {"kv_heads": 4, "block_size": 4},
    {"attn_layers": 1, "kv_heads": 1},
    {"num_blocks": 1, "block_size": 1},
]


@pytest.mark.parametrize("sizes", COINCIDENCES, ids=str)
def test_each_view_of_the_kv_pool_covers_its_own_bytes_of_each_block(sizes):
    caches = make_caches(**sizes)
    layout = caches.kv_layout
    strides = {axis.name: axis.stride for axis in layout.segments[0].axes}
    base = caches.kv.data_ptr()
    for layer, (kv, views) in itertools.product(
        range(caches.spec.attn_layers), enumerate([caches.layers.k, caches.layers.v])
    ):
        view = views[layer]
        for block, head, token in itertools.product(*(range(n) for n in view.shape[:3])):
            expected = (
                block * layout.unit_bytes
                + head * strides["kv_heads"]
                + layer * strides["attn_layers"]
                + kv * strides["key_or_value"]
                + token * strides["block_size"]
            )
            assert view[block, head, token].data_ptr() - base == expected


def test_a_block_is_one_contiguous_region():
    caches = make_caches()
    assert caches.kv[1].is_contiguous()
    assert caches.kv[1].numel() * 4 == caches.kv_layout.unit_bytes


def test_state_views_are_aligned_disjoint_and_cover_their_segments():
    caches = make_caches()
    marked = torch.zeros_like(caches.state)
    for segment in caches.state_layout.segments:
        assert segment.offset % SEGMENT_ALIGNMENT == 0
        marked[:, segment.offset : segment.offset + segment.num_bytes] += 1
    assert int(marked.max()) == 1
    views = caches.layers
    for view in (*views.conv, *views.ssm):
        view[1] = 1.0
    assert not caches.state[0].any()
    assert not caches.state[2].any()
    for layer in range(2):
        assert views.conv[layer].shape == (3, 20, 3)
        assert views.ssm[layer].shape == (3, 2, 5, 7)


def test_a_model_without_attention_or_without_mamba_has_an_empty_pool():
    assert make_caches(attn_layers=1, mamba_layers=0).state.numel() == 0
    assert make_caches(mamba_layers=1).layers.conv[0].shape[0] == 3


@pytest.mark.parametrize("absent", ["attn_layers", "mamba_layers"])
def test_a_part_that_a_model_does_not_keep_is_a_pool_of_no_bytes(absent):
    caches = make_caches(num_blocks=3, num_slots=3, **{absent: 0})
    pool, layout = {
        "attn_layers": (caches.kv, caches.kv_layout),
        "mamba_layers": (caches.state, caches.state_layout),
    }[absent]
    assert (pool.numel(), layout.unit_bytes, layout.segments, layout.num_units) == (0, 0, (), 3)
    assert len(caches.layers.k) == caches.spec.attn_layers
    assert len(caches.layers.conv) == len(caches.layers.ssm) == caches.spec.mamba_layers
    sums, ids = Checksums(caches), torch.tensor([1, 2])
    assert sums.blocks(ids, torch.tensor([4, 1])).tolist() == [0, 0]
    assert sums.shares_of_state(1).tolist() == [0] * len(caches.state_layout.segments)
    Poison(caches).blocks(ids)
    Poison(caches).slots(ids)
    store = HostStore(caches)
    block_ids = (1, 2) if caches.spec.has_kv else ()
    store.save([Swap("a", block_ids, 1)])
    store.restore([Swap("a", block_ids, 2)])
    present = caches.kv if absent == "mamba_layers" else caches.state
    assert present.view(torch.uint8).any()
