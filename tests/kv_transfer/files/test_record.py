"""Records are read back as they were written, and damage is noticed."""

import os

import pytest

from engine.files.start_files import FileJob, StartForm
from kv_transfer.files.record import (
    ALIGNMENT,
    PREFIX_BYTES,
    SegmentHeader,
    body_bytes,
    header_bytes,
    pack_header,
    parse_record,
    record_bytes,
)
from kv_transfer.files.seal import CHECK_BYTES, Sealer
from wire.errors import ConfigError

FORM = StartForm("f" * 64, "e" * 64, 1000, 2500)
SEALERS = [Sealer(), Sealer(b"k" * 32)]


def job(num_keys=3):
    keys = tuple(os.urandom(16) for _ in range(num_keys))
    return FileJob(keys, b"p" * 16, 7, tuple(range(1, num_keys + 1)), (8, 9, 10), 5)


@pytest.mark.parametrize("sealer", SEALERS)
@pytest.mark.parametrize("num_keys", [0, 1, 3, 300])
def test_a_header_is_read_back(sealer, num_keys):
    one, seal = job(num_keys), sealer.of(b"s" * 16)
    checks = os.urandom(CHECK_BYTES * one.num_pages)
    data = pack_header(one, checks, 1024, seal)
    assert len(data) == header_bytes(num_keys, one.num_pages)
    assert len(data) % ALIGNMENT == 0
    num_bytes = body_bytes(data[:PREFIX_BYTES])
    found = parse_record(data[:PREFIX_BYTES], data[PREFIX_BYTES:][:num_bytes], 1024, seal, FORM)
    assert (found.keys, found.parent, found.num_blocks, found.place) == (one.keys, one.parent, 7, 5)
    assert (found.checks, found.num_block_pages) == (checks, num_keys)
    assert found.num_bytes == record_bytes(one, FORM)
    assert found.has_state
    at_other_place = parse_record(data[:PREFIX_BYTES], data[PREFIX_BYTES:][:num_bytes], 512, seal, FORM)
    assert at_other_place is None


@pytest.mark.parametrize("sealer", SEALERS)
def test_every_flipped_bit_of_a_header_is_noticed(sealer):
    one, seal = job(1), sealer.of(b"s" * 16)
    data = pack_header(one, os.urandom(CHECK_BYTES * one.num_pages), 512, seal)
    num_used = PREFIX_BYTES + body_bytes(data[:PREFIX_BYTES])
    for place in range(num_used):
        if 12 <= place < 16:  # four bytes that mean nothing
            continue
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        num_bytes = body_bytes(bytes(flipped[:PREFIX_BYTES]))
        if num_bytes is None:
            continue
        body = bytes(flipped[PREFIX_BYTES:][:num_bytes])
        assert parse_record(bytes(flipped[:PREFIX_BYTES]), body, 512, seal, FORM) is None, place


def test_a_page_at_another_place_is_noticed():
    for sealer in SEALERS:
        seal = sealer.of(b"s" * 16)
        data, check = seal.close(512, 2, b"page")
        assert bytes(seal.open(512, 2, data, check)) == b"page"
        assert seal.open(512, 3, data, check) is None
        assert seal.open(1024, 2, data, check) is None
        assert sealer.of(b"t" * 16).open(512, 2, data, check) is None


def test_a_segment_of_another_form_or_key_is_foreign():
    header = SegmentHeader.new(1e9, SEALERS[0].name, FORM)
    data = header.pack()
    assert SegmentHeader.parse(data, SEALERS[0].name, FORM) == header
    assert SegmentHeader.parse(data, SEALERS[1].name, FORM) is None
    assert SegmentHeader.parse(data[:-1], SEALERS[0].name, FORM) is None
    for other in (
        StartForm("0" * 64, "e" * 64, 1000, 2500),
        StartForm("f" * 64, "0" * 64, 1000, 2500),
        StartForm("f" * 64, "e" * 64, 1001, 2500),
        StartForm("f" * 64, "e" * 64, 1000, 2501),
        StartForm("f" * 64, "e" * 64, 1000, 2500, False),
    ):
        assert SegmentHeader.parse(data, SEALERS[0].name, other) is None
    for place in range(ALIGNMENT):
        flipped = bytearray(data)
        flipped[place] ^= 1
        assert SegmentHeader.parse(bytes(flipped), SEALERS[0].name, FORM) is None, place


@pytest.mark.parametrize(
    ("content", "is_key"), [(b"k" * 32, True), (b"ab" * 32 + b"\n", True), (b"ab" * 31, False), (b"", False)]
)
def test_a_key_file_holds_32_bytes_or_64_hex_digits(tmp_path, content, is_key):
    path = tmp_path / "key"
    path.write_bytes(content)
    if is_key:
        assert Sealer.from_file(path).name != Sealer().name
    else:
        with pytest.raises(ConfigError, match=r"`file_cache_key_file` .* needs 32 bytes or 64 hex digits"):
            Sealer.from_file(path)


def test_a_key_file_that_can_not_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"`file_cache_key_file` .*/none can't be read"):
        Sealer.from_file(tmp_path / "none")
