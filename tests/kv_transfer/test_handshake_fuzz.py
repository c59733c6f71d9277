"""A hostile peer's handshake or ticket is refused by an error of ours, and nothing outside pools is read."""

import contextlib
import dataclasses
import multiprocessing
import queue
import secrets
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.handshake import check_regions, check_same_model, introduce
from kv_transfer.nixl.agent import TransferAgent, region_of
from kv_transfer.nixl.descriptors import EPOCH_BYTES, Share, cells_of, own_list, peer_list
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.nixl.unit_cut import cut_unit
from kv_transfer.reads.epoch_check import checked_lease
from kv_transfer.reads.part import Part, part_indices
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferListener
from testing.kv_transfer.pools import BLOCK_SIZE, SPEC, PoolShape, with_rank
from wire.errors import HandshakeError, TransferError, WireError
from wire.messages.handoff import HandshakeReply, HandshakeRequest, RankMemory, Region, Ticket
from wire.messages.layout import Axis, Layout, Segment

REFUSALS = (WireError, HandshakeError, TransferError)
TIMEOUT_S = 60.0
WORD = 1 << 64

EDGES = st.sampled_from(
    [0, 1, 2, 7, 8, 15, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -(2**63)]
)
NUMBERS = st.integers(-3, 30) | EDGES | st.integers(-(2**64), 2**65)
OURS = HandshakeRequest("sink", "fp", 1, SPEC.kv_layout(24, BLOCK_SIZE), SPEC.state_layout(8))


def honest_reply(**changes):
    reply = HandshakeReply(
        incarnation="peer",
        fingerprint="fp",
        ranks=(
            RankMemory(
                kv_layout=OURS.kv_layout,
                state_layout=OURS.state_layout,
                agent_metadata=b"opaque",
                kv_region=Region(1 << 20, OURS.kv_layout.num_bytes, 0, "DRAM"),
                state_region=Region(1 << 30, OURS.state_layout.num_bytes, 0, "DRAM"),
            ),
        ),
        epoch_region=Region(1 << 40, 8 * EPOCH_BYTES, 0, "DRAM"),
    )
    of_reply = {name: changes.pop(name) for name in list(changes) if hasattr(reply, name)}
    return dataclasses.replace(with_rank(reply, **changes), **of_reply)


@st.composite
def made(draw, cls, **fields):
    """An instance, or None where the class itself refuses the values."""
    drawn = {name: draw(strategy) for name, strategy in fields.items()}
    try:
        return cls(**drawn)
    except WireError:
        return None


def present(strategy):
    return strategy.filter(lambda value: value is not None)


axes = made(Axis, name=st.sampled_from(["block_size", "heads"]), size=NUMBERS, stride=NUMBERS)
segments = made(
    Segment,
    name=st.sampled_from(["kv", "ssm.0"]),
    dtype=st.sampled_from(["float32", "bfloat16", "?"]),
    offset=NUMBERS,
    axes=st.lists(present(axes), max_size=3).map(tuple),
)
random_layouts = made(
    Layout,
    unit=st.sampled_from(["block", "slot"]),
    num_units=NUMBERS,
    unit_bytes=NUMBERS,
    segments=st.lists(present(segments), max_size=2).map(tuple),
)
resized = st.builds(
    dataclasses.replace,
    st.sampled_from([OURS.kv_layout, OURS.state_layout]),
    num_units=st.integers(1, 40) | st.sampled_from([2**31, 2**50, 2**62, 2**64]),
)
layouts = present(random_layouts) | resized
regions = made(
    Region,
    address=NUMBERS,
    num_bytes=NUMBERS | st.sampled_from([OURS.kv_layout.num_bytes, OURS.state_layout.num_bytes]),
    device_id=st.just(0) | NUMBERS,
    memory=st.sampled_from(["DRAM", "VRAM"]),
)


@st.composite
def hostile_replies(draw):
    """An honest reply with lies in some fields; region lengths often fit the layouts all the same."""
    changes = {}
    for name, strategy in (
        ("kv_layout", layouts),
        ("state_layout", layouts),
        ("kv_region", present(regions)),
        ("state_region", present(regions)),
        ("epoch_region", present(regions)),
    ):
        if draw(st.integers(0, 3)) == 0:
            changes[name] = draw(strategy)
    reply = honest_reply(**changes)
    for kind in ("kv", "state"):
        (rank,) = reply.ranks
        region, layout = getattr(rank, f"{kind}_region"), getattr(rank, f"{kind}_layout")
        if draw(st.booleans()):
            with contextlib.suppress(WireError):
                fitting = dataclasses.replace(region, num_bytes=layout.num_bytes)
                reply = with_rank(reply, **{f"{kind}_region": fitting})
    return reply


@st.composite
def fitting_replies(draw):
    """Pools of any size at any address; most are accepted."""
    changes = {}
    for kind, layout in (("kv", OURS.kv_layout), ("state", OURS.state_layout)):
        units = draw(st.integers(1, 40) | st.sampled_from([2**31, 2**40]))
        resized_layout = dataclasses.replace(layout, num_units=units)
        changes[f"{kind}_layout"] = resized_layout
        changes[f"{kind}_region"] = draw(regions_of(resized_layout.num_bytes))
    changes["epoch_region"] = draw(regions_of(EPOCH_BYTES * draw(st.integers(1, 12))))
    return honest_reply(**changes)


def regions_of(num_bytes):
    """At any address, also such that they end with the last possible byte or one byte after it."""
    last = WORD - num_bytes
    addresses = st.integers(0, last) | st.sampled_from([0, last, last + 1])
    return st.builds(Region, addresses, st.just(num_bytes), st.just(0), st.just("DRAM"))


tickets = made(
    Ticket,
    request_id=st.just("r"),
    lease_id=st.integers(0, 9) | NUMBERS,
    epoch=NUMBERS,
    address=st.just("127.0.0.1:1"),
    incarnation=st.just("peer"),
    num_tokens=st.integers(1, 99) | NUMBERS,
    block_ids=st.lists(st.integers(1, 26) | st.integers(1, 26) | NUMBERS, max_size=6).map(tuple),
    state_slot=st.integers(1, 9) | NUMBERS,
    ttl_s=st.just(1.0) | st.floats(),
)


def accepts(reply):
    try:
        check_same_model(OURS, reply, "peer")
        check_regions(reply)
    except REFUSALS:
        return False
    return True


@settings(max_examples=100)
@given(hostile_replies())
def test_a_reply_is_refused_or_its_regions_hold_its_pools_within_64_bits(reply):
    if not accepts(reply):
        return
    (rank,) = reply.ranks
    assert rank.kv_layout.same_unit(OURS.kv_layout)
    assert rank.state_layout.same_unit(OURS.state_layout)
    for region, needed in (
        (rank.kv_region, rank.kv_layout.num_bytes),
        (rank.state_region, rank.state_layout.num_bytes),
        (reply.epoch_region, EPOCH_BYTES),
    ):
        assert needed <= region.num_bytes
        assert 0 <= region.address <= region.address + region.num_bytes <= WORD


@pytest.fixture(scope="module")
def sink():
    caches = PoolShape().caches()
    faults = queue.Queue()
    introduction = introduce(caches, f"sink-{secrets.token_hex(4)}", "fp")
    thread = TransferThread(caches, introduction.incarnation, faults.put)
    made_sink = TransferSink(thread, introduction, TransferListener())
    thread.start(made_sink)
    yield SimpleNamespace(sink=made_sink, caches=caches, faults=faults)
    thread.close()
    assert faults.empty(), faults.get()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reply=fitting_replies().filter(accepts), ticket=present(tickets), first=st.integers(0, 3), data=st.data()
)
def test_no_descriptor_lies_outside_either_side_s_pools(sink, reply, ticket, first, data):
    """Descriptors as a transfer makes them from an accepted reply and any ticket."""
    wanted = max(0, len(ticket.block_ids) - first)
    ours = data.draw(
        st.lists(st.integers(1, 23), min_size=wanted, max_size=wanted) | st.lists(NUMBERS, max_size=4)
    )
    slot = data.draw(st.integers(1, 7))
    part = Part(ours, ticket.block_ids[first:], [slot], [ticket.state_slot])
    layouts = sink.caches.kv_layout, sink.caches.state_layout
    pools = RankMemory(*layouts, b"", region_of(sink.caches.kv), region_of(sink.caches.state))
    try:
        (rank,) = reply.ranks
        share = Share(*(cut_unit(*both, rank=0)[0] for both in zip(layouts, _layouts_of(reply), strict=True)))
        indices = part_indices(part, pools, rank, share)
        descriptors = own_list(pools, share)[indices.local], peer_list(rank, share)[indices.remote]
        epoch = cells_of(reply.epoch_region)[checked_lease(ticket.lease_id, reply.epoch_region)]
    except REFUSALS:
        return
    here = [region_of(pool) for pool in (sink.caches.kv, sink.caches.state)]
    there = [rank.kv_region, rank.state_region]
    units = [sink.caches.kv_layout.unit_bytes, sink.caches.state_layout.unit_bytes]
    ours_and_theirs = zip(*(one.tolist() for one in descriptors), strict=True)
    for (local, num_bytes), (remote, as_many) in ours_and_theirs:
        assert num_bytes == as_many > 0
        for start, pools in ((local, here), (remote, there)):
            assert any(
                pool.address + unit <= start and start + num_bytes <= pool.address + pool.num_bytes
                for pool, unit in zip(pools, units, strict=True)
            )
    assert 0 <= ticket.lease_id < reply.epoch_region.num_bytes // EPOCH_BYTES
    assert epoch.tolist() == [reply.epoch_region.address + ticket.lease_id * EPOCH_BYTES, EPOCH_BYTES]
    assert indices.num_bytes == len(ours) * units[0] + units[1]
    assert indices.num_bytes == int(descriptors[0][:, 1].sum())


def _layouts_of(reply):
    return [[rank.kv_layout for rank in reply.ranks], [rank.state_layout for rank in reply.ranks]]


@st.composite
def divided(draw, layout):
    """The layout's units divided among ranks, which hold anything, in any order, several times or never."""
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        segments, offset = [], 0
        for segment in layout.segments:
            size, stride = segment.axes[0].size, segment.axes[0].stride
            pairs = st.tuples(st.integers(0, size + 1), st.integers(1, size))
            holds = tuple((a, a + n) for a, n in draw(st.lists(pairs, min_size=1, max_size=3)))
            num_held = sum(stop - start for start, stop in holds)
            axes = (dataclasses.replace(segment.axes[0], size=num_held), *segment.axes[1:])
            segments.append(dataclasses.replace(segment, offset=offset, axes=axes, holds=holds))
            offset += num_held * stride + draw(st.sampled_from([0, 0, 64]))
        ranks.append(dataclasses.replace(layout, unit_bytes=offset, segments=tuple(segments)))
    return ranks


@settings(max_examples=100)
@given(st.sampled_from([OURS.kv_layout, OURS.state_layout]), st.data())
def test_whatever_ranks_say_that_they_hold_no_piece_lies_outside_a_unit(layout, data):
    ranks = data.draw(divided(layout))
    try:
        cuts = cut_unit(layout, ranks, rank=data.draw(st.integers(0, 3)))
    except HandshakeError:
        return
    written = np.zeros(layout.unit_bytes, dtype=np.int64)
    for cut, rank in zip(cuts, ranks, strict=True):
        for piece in cut:
            assert piece.num_bytes > 0
            assert 0 <= piece.remote <= piece.remote + piece.num_bytes <= rank.unit_bytes
            assert 0 <= piece.local <= piece.local + piece.num_bytes <= layout.unit_bytes
            written[piece.local : piece.local + piece.num_bytes] += 1
    for segment in layout.segments:
        assert (written[segment.offset : segment.offset + segment.num_bytes] == 1).all()


# --- with real NIXL, in a process that may crash ----------------------------------------------------


NAME = b"hostile"


def _hostile_metadata(pipe, seed):
    """Feeds a sink metadata that was made up, cut, doubled and renamed; then what is true.

    Bits flipped inside UCX's worker address are not tried: NIXL 1.5 and UCX 1.23 crash on some (SIGSEGV). The
    handshake's digest keeps these away (tests/kv_transfer/test_damage.py). A peer that makes a right digest
    of bad metadata has to be trusted.
    """
    caches, peer_caches = PoolShape().caches(), PoolShape().caches()
    faults = queue.Queue()
    agent = TransferAgent(NAME.decode(), [peer_caches.kv, peer_caches.state])
    thread = TransferThread(caches, "victim", faults.put)
    sink = TransferSink(thread, introduce(caches, "victim", "fp"), TransferListener())
    thread.start(sink)
    regions = {"kv_region": region_of(peer_caches.kv), "state_region": region_of(peer_caches.state)}
    outcomes = []
    for count, broken in enumerate(_mutations(agent.metadata, np.random.default_rng(seed))):
        # NIXL remembers a name under which it was told nonsense: each gets its own.
        name = b"h%06d" % count
        reply = honest_reply(incarnation=name.decode(), agent_metadata=broken.replace(NAME, name), **regions)
        try:
            added = sink._reader.peers._add_rank(reply.incarnation, reply.ranks[0].agent_metadata)
            outcomes.append("accepted")
            thread.agent.remove_peer(added)
        except REFUSALS:
            outcomes.append("refused")
    reply = honest_reply(incarnation=NAME.decode(), agent_metadata=agent.metadata, **regions)
    outcomes.append(
        "the true one accepted"
        if sink._reader.peers._add_rank(reply.incarnation, reply.ranks[0].agent_metadata)
        else ""
    )
    thread.agent.remove_peer(NAME.decode())
    thread.close()
    agent.close()
    pipe.send((outcomes, faults.qsize()))


def _mutations(metadata, generator):
    yield b""
    yield b"\x00"
    for length in (1, 8, 64, 4096):
        yield generator.bytes(length)
    for cut in generator.integers(0, len(metadata), 40):
        yield metadata[:cut]
    yield metadata + metadata
    yield metadata.replace(NAME, b"victim\x00")
    yield metadata.replace(NAME, b"\xff" * len(NAME))


def test_metadata_that_is_not_nixl_s_is_refused_and_harms_no_one():
    """In a process of its own: NIXL parses these bytes in C++."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_hostile_metadata, args=(theirs, 1))
    process.start()
    theirs.close()
    try:
        assert pipe.poll(TIMEOUT_S), "no answer"
        outcomes, num_faults = pipe.recv()  # EOFError: the process crashed
        process.join(TIMEOUT_S)
    finally:
        process.kill()
    assert process.exitcode == 0
    assert outcomes[-1] == "the true one accepted"
    assert "refused" in outcomes
    assert num_faults == 0
