"""What is read is compared with the digests in its ticket. Damage is found, and no wrong alarm is raised."""

from __future__ import annotations

import dataclasses

import pytest

import kv_transfer.digester
import kv_transfer.reads.verifier
from kv_transfer.reads.part import Part
from testing.kv_transfer.pools import BLOCK_SIZE, PoolShape, spec_with, unit_bytes_of
from wire.codec import decode, encode
from wire.errors import WireError
from wire.messages.handoff import Done, Progress, Ticket, UnitDigests

BLOCKS, SLOT = [3, 5, 6, 9, 2], 4
LOCAL_BLOCKS, LOCAL_SLOT = [1, 2, 3, 4, 5], 2
NUM_TOKENS = len(BLOCKS) * BLOCK_SIZE
SHAPES = {
    "blocks and state": PoolShape(),
    "no state": PoolShape(spec=spec_with(mamba_layers=0)),
    "no blocks": PoolShape(spec=spec_with(attn_layers=0)),
}


@pytest.fixture(params=["at once", "in pieces, on the digesting thread"])
def way(request, monkeypatch):
    if request.param != "at once":
        monkeypatch.setattr(kv_transfer.digester, "QUICK_BYTES", 0)
        monkeypatch.setattr(kv_transfer.reads.verifier, "PIECE_BYTES", 1)
    return request.param


@pytest.fixture
def pair(make_pair, way):
    return make_pair(verifies=True)


def sealed(pair, num_tokens=NUM_TOKENS, blocks=BLOCKS, slot=SLOT):
    ticket = pair.source.grant("r", list(blocks), slot)
    return pair.source.seal(dataclasses.replace(ticket, num_tokens=num_tokens))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sound_memory_is_taken(make_pair, way, shape):
    pair = make_pair(shape, verifies=True)
    blocks = BLOCKS if shape.spec.has_kv else []
    slot = SLOT if shape.spec.has_state else 0
    ticket = sealed(pair, blocks=blocks, slot=slot)
    result = pair.decode.read(ticket, LOCAL_BLOCKS[: len(blocks)], LOCAL_SLOT if slot else 0)
    assert result.error is None
    there = pair.source.pools()
    assert unit_bytes_of(pair.decode.caches.kv)[LOCAL_BLOCKS[: len(blocks)]].numpy().tobytes() == b"".join(
        there[0][one * shape.spec.block_bytes(BLOCK_SIZE) :][: shape.spec.block_bytes(BLOCK_SIZE)]
        for one in blocks
    )


@pytest.mark.parametrize(("kind", "unit"), [("block", BLOCKS[0]), ("block", BLOCKS[-1]), ("slot", SLOT)])
def test_memory_that_changed_after_its_ticket_is_found(pair, kind, unit, caplog):
    caplog.set_level("DEBUG", "kv_transfer")  # further lines of a kind
    ticket = sealed(pair)
    pair.source.damage(kind, unit, 77)
    result = pair.decode.read(ticket, LOCAL_BLOCKS, LOCAL_SLOT)
    assert (result.error.cause, result.settled, result.num_bytes) == ("digest", True, 0)
    what = f"state {unit}" if kind == "slot" else f"block {unit}"
    assert f"{what} has the digest" in result.error.message
    assert result.error.message in caplog.text
    pair.source.damage(kind, unit, 77)
    assert pair.decode.read(ticket, LOCAL_BLOCKS, LOCAL_SLOT).error is None  # sound again: the same bit


def test_a_wrong_block_id_is_found(pair):
    ticket = sealed(pair)
    wrong = dataclasses.replace(ticket, block_ids=(*ticket.block_ids[:-1], 11))
    assert pair.decode.read(wrong, LOCAL_BLOCKS, LOCAL_SLOT).error.cause == "digest"


def test_what_lies_behind_the_last_token_does_not_count(pair):
    """A step that was launched before the request ended may write it."""
    ticket = sealed(pair, num_tokens=NUM_TOKENS - 3)
    unit_bytes = pair.decode.caches.kv_layout.unit_bytes
    pair.source.damage("block", BLOCKS[-1], unit_bytes - 1)
    assert pair.decode.read(ticket, LOCAL_BLOCKS, LOCAL_SLOT).error is None
    pair.source.damage("block", BLOCKS[-1], 0)
    assert pair.decode.read(ticket, LOCAL_BLOCKS, LOCAL_SLOT).error.cause in ("digest", "lease_ended")


def test_memory_of_a_lease_that_has_ended_is_not_taken_for_damaged(pair, caplog):
    caplog.set_level("DEBUG", "kv_transfer")
    ticket = sealed(pair)
    pair.source.end(ticket)
    pair.source.next_ended()
    pair.source.fill(99)
    assert pair.decode.read(ticket, LOCAL_BLOCKS, LOCAL_SLOT).error.cause == "lease_ended"
    assert "is not what was sent" not in caplog.text


def test_a_ticket_of_the_last_release_has_no_digests_and_nothing_is_compared(pair):
    ticket = dataclasses.replace(sealed(pair), unit_digests=None)
    pair.source.damage("block", BLOCKS[0], 0)
    assert pair.decode.read(ticket, LOCAL_BLOCKS, LOCAL_SLOT).error is None


def test_blocks_that_were_cached_are_neither_read_nor_compared(pair):
    ticket = sealed(pair)
    pair.source.damage("block", BLOCKS[1], 0)
    pair.decode.sink.read(
        ticket, block_ids=LOCAL_BLOCKS[2:], first_block=2, state_slot=LOCAL_SLOT, deadline_s=5.0
    )
    assert pair.decode.result().error is None


@pytest.mark.parametrize("damaged", [None, BLOCKS[0], BLOCKS[4]])
def test_parts_of_a_prompt_that_is_being_computed_are_compared(pair, damaged):
    ticket = sealed(pair)
    assert ticket.unit_digests is not None
    if damaged is not None:
        pair.source.damage("block", damaged, 5)
    transfer = pair.decode.sink.begin("r", ticket.incarnation, deadline_s=5.0)
    early = UnitDigests(ticket.unit_digests.blocks[:3], 0)
    transfer.read_part(Part(LOCAL_BLOCKS[:3], BLOCKS[:3], digests=early))
    last = Part.last(
        LOCAL_BLOCKS[3:],
        BLOCKS[3:],
        LOCAL_SLOT,
        SLOT,
        digests=ticket.unit_digests,
        num_tokens=ticket.num_tokens,
    )
    transfer.finish(last, Done(ticket.lease_id, ticket.epoch))
    error = pair.decode.result().error
    assert (error and error.cause) == (None if damaged is None else "digest")


def test_a_state_of_several_pieces_comes_first():
    part = Part.last((1, 2, 3), (4, 5, 6), 7, 8, digests=UnitDigests((9, 10, 11, 12), 13), num_tokens=50)
    assert list(part.pieces(2)) == [
        Part((), (), (7,), (8,), UnitDigests((10, 11, 12), 13)),
        Part((1, 2), (4, 5), digests=UnitDigests((10, 11), 0)),
        Part((3,), (6,), digests=UnitDigests((12,), 0), num_tokens=50),
    ]


def test_messages_with_too_few_digests_are_refused():
    ticket = Ticket("r", 0, 1, "a:1", "aa", 16, (1, 2), 1, 1.0)
    with pytest.raises(WireError, match="1 unit digests for 2 blocks"):
        dataclasses.replace(ticket, unit_digests=UnitDigests((1,), 2))
    with pytest.raises(WireError, match="1 digests for 2 blocks"):
        Progress((1, 2), (3,))
    whole = dataclasses.replace(ticket, unit_digests=UnitDigests((1, 2**64 - 1), 2**64 - 1))
    assert decode(encode(whole), Ticket) == whole
