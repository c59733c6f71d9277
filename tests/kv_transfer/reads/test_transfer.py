"""Blocks and states are copied from one process's pools to another's, and nothing else is."""

import dataclasses
import random

import pytest
import torch

from testing.kv_transfer.pools import POISON, PoolShape, fill, spec_with, unit_bytes_of

SHAPES = {
    "plain": PoolShape(),
    "two blocks beside keys and values": PoolShape(num_blocks=2, num_slots=2),
    "as many heads as tokens a block": PoolShape(spec_with(kv_heads=8), block_size=8),
    "one layer of each kind": PoolShape(spec_with(attn_layers=1, mamba_layers=1)),
    "one head": PoolShape(spec_with(kv_heads=1, mamba_heads=1)),
    "one token a block": PoolShape(block_size=1),
    "all sizes two": PoolShape(spec_with(attn_layers=2, kv_heads=2, head_dim=2), 2, 3, 2),
    "bfloat16": PoolShape(spec_with(kv_dtype=torch.bfloat16, conv_dtype=torch.bfloat16)),
    "odd bytes a block": PoolShape(
        spec_with(kv_dtype=torch.bfloat16, kv_heads=3, head_dim=7, attn_layers=1), block_size=5
    ),
    "no recurrent layers": PoolShape(spec_with(mamba_layers=0), num_slots=1),
    "no attention layers": PoolShape(spec_with(attn_layers=0, kv_heads=0, head_dim=0), num_blocks=1),
    "hundreds of KB a state": PoolShape(spec_with(mamba_heads=16, mamba_head_dim=64, state_size=64)),
}


def expected_pools(decode, ticket, block_ids, state_slot, source_shape, seed):
    """Our pools as they must be: poison, the named units from the source's, and its null entry, which is read
    at the first contact."""
    theirs = source_shape.caches()
    fill(theirs, seed)
    expected = []
    for mine, other, here, there in (
        (decode.caches.kv, theirs.kv, block_ids, ticket.block_ids),
        (decode.caches.state, theirs.state, [state_slot], [ticket.state_slot]),
    ):
        units = torch.full_like(unit_bytes_of(mine), POISON)
        units[[0, *here]] = unit_bytes_of(other)[[0, *there]]
        expected.append(units)
    return expected


def assert_pools_equal(decode, expected):
    for mine, units in zip((decode.caches.kv, decode.caches.state), expected, strict=True):
        assert torch.equal(unit_bytes_of(mine), units)


def some_ids(rng, num_units, count):
    """Runs and scattered ids, in no order, never the null entry."""
    ids = list(range(1, num_units))
    if rng.random() < 0.5:
        rng.shuffle(ids)
    return ids[:count]


@pytest.mark.parametrize("transport", ["default", "emulated"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_read_moves_the_named_units_and_no_other_byte(make_pair, name, transport):
    shape = SHAPES[name]
    rng = random.Random(name)
    wider = dataclasses.replace(shape, num_blocks=shape.num_blocks + 3, num_slots=shape.num_slots + 1)
    pair = make_pair(shape, decode_shape=wider, transport=transport, seed=7)
    before = pair.source.pools()
    count = min(9, shape.most_blocks)
    theirs, ours = some_ids(rng, shape.num_blocks, count), some_ids(rng, wider.num_blocks, count)
    ticket = pair.source.grant("a", theirs, shape.last_slot)
    result = pair.decode.read(ticket, ours, wider.last_slot)
    assert result.error is None
    assert result.settled
    unit_bytes = pair.decode.caches.kv_layout.unit_bytes, pair.decode.caches.state_layout.unit_bytes
    assert result.num_bytes == count * unit_bytes[0] + unit_bytes[1] == pair.decode.sink.counts.bytes_read
    assert_pools_equal(pair.decode, expected_pools(pair.decode, ticket, ours, wider.last_slot, shape, seed=7))
    assert pair.source.next_ended().reason == "done"
    assert pair.source.pools() == before


def test_a_run_of_blocks_and_the_state_take_two_descriptors(make_pair):
    pair = make_pair()
    result = pair.decode.read(pair.source.grant("a", [5, 6, 7, 8], 3), [2, 3, 4, 5], 1)
    assert result.error is None
    assert result.num_descriptors == 2


@pytest.mark.parametrize("transport", ["default", "emulated"])
def test_many_reads_at_once_each_land_where_they_belong(make_pair, transport):
    shape = PoolShape(num_blocks=200, num_slots=65)
    pair = make_pair(shape, transport=transport, seed=3)
    rng = random.Random(5)
    theirs, ours = list(range(1, 200)), list(range(1, 200))
    rng.shuffle(theirs)
    rng.shuffle(ours)
    reads = []
    for i in range(64):
        there, here = theirs[3 * i : 3 * i + 3], ours[3 * i : 3 * i + 3]
        reads.append((pair.source.grant(f"r{i}", there, i + 1), here, 64 - i))
    for ticket, here, slot in reads:
        pair.decode.start(ticket, here, slot)
    results = [pair.decode.result() for _ in reads]
    assert [r.error for r in results] == [None] * 64
    assert {r.request_id for r in results} == {f"r{i}" for i in range(64)}
    assert {pair.source.next_ended().request_id for _ in reads} == {f"r{i}" for i in range(64)}
    source = shape.caches()
    fill(source, 3)
    kv, state = unit_bytes_of(pair.decode.caches.kv), unit_bytes_of(pair.decode.caches.state)
    for ticket, here, slot in reads:
        assert torch.equal(kv[here], unit_bytes_of(source.kv)[list(ticket.block_ids)])
        assert torch.equal(state[slot], unit_bytes_of(source.state)[ticket.state_slot])
    assert pair.decode.sink.counts.num_in_flight == 0


def test_two_decode_servers_read_from_one_prefill_server(make_pair, make_decode):
    pair = make_pair(seed=11)
    other = make_decode(PoolShape())
    other.connect(pair.source)
    tickets = [pair.source.grant(name, [4, 5], slot) for name, slot in (("a", 1), ("b", 2))]
    pair.decode.start(tickets[0], [1, 2], 1)
    other.start(tickets[1], [3, 9], 5)
    assert pair.decode.result().error is None
    assert other.result().error is None
    assert {pair.source.next_ended().request_id for _ in range(2)} == {"a", "b"}
    for decode, ticket, ours, slot in ((pair.decode, tickets[0], [1, 2], 1), (other, tickets[1], [3, 9], 5)):
        assert_pools_equal(decode, expected_pools(decode, ticket, ours, slot, PoolShape(), seed=11))


def test_one_decode_server_reads_from_two_prefill_servers(make_pair, own_source):
    pair = make_pair(seed=1)
    second = own_source()
    second.open(PoolShape(), seed=2)
    pair.decode.connect(second, "127.0.0.1:2")
    assert pair.decode.read(pair.source.grant("a", [1], 1), [1], 1).error is None
    assert pair.decode.read(second.grant("b", [1], 1), [2], 2).error is None
    assert pair.source.next_ended().request_id == "a"
    assert second.next_ended().request_id == "b"
    assert not torch.equal(pair.decode.caches.kv[1], pair.decode.caches.kv[2])
