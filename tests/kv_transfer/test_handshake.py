"""Two servers that can't share state get an error that names both values."""

import dataclasses

import pytest
import torch

from kv_transfer.handshake import check_regions, check_same_model
from testing.kv_transfer.pools import SPEC, with_rank
from wire.errors import HandshakeError
from wire.messages.handoff import HandshakeReply, HandshakeRequest, RankMemory, Region


def introduction(spec=SPEC, block_size=8, num_blocks=5, num_slots=3, **changes):
    request = HandshakeRequest(
        "aa", "fp-1", 1, spec.kv_layout(num_blocks, block_size), spec.state_layout(num_slots)
    )
    return dataclasses.replace(request, **changes)


def reply(**changes):
    kv, state = SPEC.kv_layout(5, 8), SPEC.state_layout(3)
    made = HandshakeReply(
        incarnation="bb",
        fingerprint="fp-1",
        ranks=(
            RankMemory(
                kv_layout=kv,
                state_layout=state,
                agent_metadata=b"opaque",
                kv_region=Region(4096, kv.num_bytes, 0, "DRAM"),
                state_region=Region(1 << 20, state.num_bytes, 0, "DRAM"),
            ),
        ),
        epoch_region=Region(1 << 30, 16, 0, "DRAM"),
    )
    of_reply = {name: changes.pop(name) for name in list(changes) if hasattr(made, name)}
    return dataclasses.replace(with_rank(made, **changes), **of_reply)


def region_of_reply(name):
    return reply().epoch_region if name == "epoch_region" else getattr(reply().ranks[0], name)


def test_pools_of_different_sizes_fit():
    check_same_model(introduction(), introduction(num_blocks=2, num_slots=9), "peer")


def test_another_fingerprint_is_refused_with_both():
    with pytest.raises(HandshakeError, match=r"peer .*fp-2.*fp-1"):
        check_same_model(introduction(), introduction(fingerprint="fp-2"), "peer")


def test_another_block_size_is_refused_with_both():
    with pytest.raises(HandshakeError, match=r"block_size 16.*block_size 8"):
        check_same_model(introduction(), introduction(block_size=16), "peer")


def test_another_dtype_is_refused_with_both():
    half = dataclasses.replace(SPEC, kv_dtype=torch.bfloat16)
    with pytest.raises(HandshakeError, match=r"bfloat16.*float32"):
        check_same_model(introduction(), introduction(half), "peer")


def test_a_dtype_of_the_same_width_is_refused():
    half, other_half = (dataclasses.replace(SPEC, kv_dtype=d) for d in (torch.float16, torch.bfloat16))
    with pytest.raises(HandshakeError, match=r"bfloat16.*float16"):
        check_same_model(introduction(half), introduction(other_half), "peer")


def test_kv_caches_of_other_formats_are_refused_with_both_and_the_flag_that_sets_them():
    formats = (torch.float8_e4m3fn, torch.bfloat16)
    narrow, wide = (dataclasses.replace(SPEC, kv_dtype=dtype) for dtype in formats)
    ours, theirs = introduction(wide, block_size=8), introduction(narrow, block_size=16)  # of equal bytes
    with pytest.raises(HandshakeError, match=r"float8_e4m3fn.*bfloat16.*`kv_cache_dtype`"):
        check_same_model(ours, theirs, "peer")
    check_same_model(introduction(narrow), introduction(narrow), "peer")


def test_equal_bytes_in_another_shape_are_refused():
    """4 heads of 8 tokens take the bytes of 8 heads of 4 tokens."""
    other = dataclasses.replace(SPEC, kv_heads=8)
    ours, theirs = introduction(block_size=8), introduction(other, block_size=4)
    assert ours.kv_layout.unit_bytes == theirs.kv_layout.unit_bytes
    with pytest.raises(HandshakeError, match=r"kv_heads 8.*block_size 4.*kv_heads 4.*block_size 8"):
        check_same_model(ours, theirs, "peer")


def test_another_state_is_refused_with_both():
    other = dataclasses.replace(SPEC, ssm_dtype=torch.bfloat16)
    with pytest.raises(HandshakeError, match=r"ssm bfloat16.*ssm float32"):
        check_same_model(introduction(), introduction(other), "peer")


def test_another_number_of_mamba_layers_is_refused_with_both():
    other = dataclasses.replace(SPEC, mamba_layers=2)
    with pytest.raises(HandshakeError) as refusal:
        check_same_model(introduction(), introduction(other), "peer")
    ours, theirs = SPEC.slot_bytes, other.slot_bytes
    assert f"{theirs} bytes" in refusal.value.message
    assert f"{ours} bytes" in refusal.value.message


def test_another_number_of_ranks_fits_if_what_they_divide_is_the_same():
    half = dataclasses.replace(SPEC, kv_heads=2, conv_channels=6, mamba_heads=1)
    check_same_model(introduction(), introduction(half, tp_size=2), "peer")
    other = dataclasses.replace(half, head_dim=8)
    with pytest.raises(HandshakeError, match="lays out a block"):
        check_same_model(introduction(), introduction(other, tp_size=2), "peer")


def test_ranks_that_differ_are_refused():
    made = reply()
    fewer = SPEC.state_layout(2)
    other = dataclasses.replace(
        made.ranks[0],
        state_layout=fewer,
        state_region=Region(1 << 20, fewer.num_bytes, 0, "DRAM"),
    )
    with pytest.raises(HandshakeError, match="the peer's ranks differ: 2 slots"):
        check_regions(dataclasses.replace(made, ranks=(*made.ranks, other)))


def test_regions_that_hold_the_pools_fit():
    check_regions(reply())


@pytest.mark.parametrize("name", ["kv_region", "state_region"])
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_region_that_is_not_its_pool_s_size_is_refused_with_both(name, difference):
    region = region_of_reply(name)
    other = dataclasses.replace(region, num_bytes=region.num_bytes + difference)
    with pytest.raises(HandshakeError, match=rf"{other.num_bytes} bytes.*{region.num_bytes}"):
        check_regions(reply(**{name: other}))


@pytest.mark.parametrize("num_bytes", [0, 7, 12])
def test_an_epoch_table_without_whole_cells_is_refused(num_bytes):
    with pytest.raises(HandshakeError, match=f"{num_bytes} bytes"):
        check_regions(reply(epoch_region=Region(1 << 30, num_bytes, 0, "DRAM")))


@pytest.mark.parametrize("name", ["kv_region", "state_region", "epoch_region"])
def test_a_region_that_runs_past_the_last_address_is_refused(name):
    """Adding an offset to such an address would overflow NIXL's 64 bits."""
    region = region_of_reply(name)
    beyond = dataclasses.replace(region, address=(1 << 64) - region.num_bytes + 1)
    with pytest.raises(HandshakeError, match=r"end past the last address"):
        check_regions(reply(**{name: beyond}))
