"""The bytes of a segment: a header, then records. Pure.

    segment:  header | record | record | ...             each begins at a multiple of 512 bytes
    record:   prefix | body | pages of blocks | pages of the state

A record holds a start's state and those blocks before it that files lacked. Its header is written after its
pages: a record whose writer died has zeros there, and is the end of its segment. The body is sealed like a
page, since keys are digests of people's prompts. It has a keyed hash of the owner, by which records are
purged. A purged record is zeros behind a prefix that says how long it was.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass

from engine.files.start_files import FileJob, StartForm
from kv_transfer.files.seal import CHECK_BYTES, HEADER, PURGED, Seal
from wire.messages.cache_salt import owner_of
from wire.messages.prefixes import KEY_BYTES

ALIGNMENT = 512
FORMAT = 4
"""Increase it when the layout below changes, or when a model's blocks and states get other bits. Servers
delete segments of another format. Before format 3 records had no owners, before format 4 another checksum."""
SEGMENT_ID_BYTES = 16
MAX_BODY_BYTES = 64 << 20
"""A longer body is damage: it would hold the keys of 30 million tokens."""

_SEGMENT = struct.Struct("<8sII16sQ8s64s64sQ")
_SEGMENT_MAGIC = b"TWFSEGM\n"
_PREFIX = struct.Struct("<8sII16s")
_RECORD_MAGIC = b"TWFRECO\n"
_PURGED = struct.Struct("<8s4sI16s")
_PURGED_MAGIC = b"TWFGONE\n"
_BODY = struct.Struct("<16sIIIIIIQ16s")
PREFIX_BYTES = _PREFIX.size


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class SegmentHeader:
    """The first bytes of a segment."""

    segment_id: bytes
    created_s: int
    """Seconds since 1970."""
    sealer: bytes
    """Name of the key that seals the segment."""
    form: StartForm

    @classmethod
    def new(cls, created_s: float, sealer: bytes, form: StartForm) -> SegmentHeader:
        return cls(os.urandom(SEGMENT_ID_BYTES), int(created_s), sealer, form)

    def pack(self) -> bytes:
        form = self.form
        data = _SEGMENT.pack(
            *(_SEGMENT_MAGIC, FORMAT, int(form.has_kv), self.segment_id, self.created_s, self.sealer),
            *(form.fingerprint.encode("latin-1"), form.layout.encode("latin-1")),
            form.page_bytes << 32 ^ form.state_bytes,
        )
        return (data + _digest(data)).ljust(ALIGNMENT, b"\0")

    @classmethod
    def parse(cls, data: bytes, sealer: bytes, form: StartForm) -> SegmentHeader | None:
        """Returns the header of a segment that this server may use; None: the segment is foreign."""
        header = cls.read(data)
        return header if header is not None and (header.sealer, header.form) == (sealer, form) else None

    @classmethod
    def read(cls, data: bytes) -> SegmentHeader | None:
        """Returns the header of any segment; None: it is damaged or of another format."""
        if len(data) < ALIGNMENT:
            return None
        _, _, has_kv, segment_id, created_s, sealer, fingerprint, layout, sizes = _SEGMENT.unpack_from(data)
        names = [name.rstrip(b"\0").decode("latin-1") for name in (fingerprint, layout)]
        form = StartForm(names[0], names[1], sizes >> 32, sizes & 0xFFFF_FFFF, bool(has_kv))
        header = cls(segment_id, created_s, sealer, form)
        return header if header.pack() == data[:ALIGNMENT] else None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECK_BYTES).digest()


@dataclass(frozen=True, eq=False)
class Record:
    """What a record holds, and where in its segment."""

    offset: int
    keys: tuple[bytes, ...]
    parent: bytes
    """Key of the block before the first one; empty if there is none."""
    num_blocks: int
    """Number of blocks from the prompt's start to the record's start."""
    place: int
    num_block_pages: int
    checks: bytes
    """One check a page: pages of blocks first, then those of the state."""
    num_bytes: int
    """From the record's offset to that of the next one."""
    number: int = 0
    """The number of the job that has written it. The other ranks' shares have the same one."""
    owner: bytes = b""
    """What stands for the owner of the prompts (:meth:`kv_transfer.files.seal.Seal.tag`)."""

    @property
    def pages_at(self) -> int:
        """Offset of the first page."""
        return self.offset + header_bytes(len(self.keys), len(self.checks) // CHECK_BYTES)

    @property
    def has_state(self) -> bool:
        return len(self.checks) > self.num_block_pages * CHECK_BYTES

    def check(self, page: int) -> bytes:
        return self.checks[page * CHECK_BYTES : (page + 1) * CHECK_BYTES]


def header_bytes(num_keys: int, num_pages: int) -> int:
    """Returns the bytes before a record's pages."""
    return align(PREFIX_BYTES + _BODY.size + num_keys * KEY_BYTES + num_pages * CHECK_BYTES)


def record_bytes(job: FileJob, form: StartForm) -> int:
    """Returns the bytes of the record of a job."""
    pages = len(job.block_pages) * form.page_bytes + bool(job.state_pages) * form.state_bytes
    return align(header_bytes(len(job.keys), job.num_pages) + pages)


def owner_tag(job: FileJob, seal: Seal) -> bytes:
    """Returns what stands for the owner of a start."""
    return seal.tag(owner_of(job.salt))


def pack_header(job: FileJob, checks: bytes, offset: int, seal: Seal) -> bytes:
    """Returns a record's prefix and body."""
    body = _BODY.pack(
        *(job.parent, len(job.parent), len(job.keys), len(job.block_pages), len(job.state_pages)),
        *(job.num_blocks, job.place, job.number, owner_tag(job, seal)),
    )
    data, check = seal.close(offset, HEADER, body + b"".join(job.keys) + checks)
    prefix = _PREFIX.pack(_RECORD_MAGIC, len(data), 0, check)
    return (prefix + bytes(data)).ljust(header_bytes(len(job.keys), job.num_pages), b"\0")


def body_bytes(prefix: bytes) -> int | None:
    """Returns the length of the body behind a record's prefix; None: this is no record."""
    if len(prefix) < PREFIX_BYTES:
        return None
    magic, num_bytes, _, _ = _PREFIX.unpack_from(prefix)
    return num_bytes if magic == _RECORD_MAGIC and _BODY.size <= num_bytes <= MAX_BODY_BYTES else None


def parse_record(prefix: bytes, body: bytes, offset: int, seal: Seal, form: StartForm) -> Record | None:
    """Returns the record at ``offset``; None: its header is damaged."""
    _, _, _, check = _PREFIX.unpack_from(prefix)
    opened = seal.open(offset, HEADER, body, check)
    if opened is None:
        return None
    parent, parent_bytes, num_keys, num_block_pages, num_state_pages, *rest = _BODY.unpack_from(opened)
    num_blocks, place, number, owner = rest
    keys_end = _BODY.size + num_keys * KEY_BYTES
    keys = tuple(bytes(opened[i : i + KEY_BYTES]) for i in range(_BODY.size, keys_end, KEY_BYTES))
    pages = num_block_pages * form.page_bytes + bool(num_state_pages) * form.state_bytes
    num_bytes = align(header_bytes(num_keys, num_block_pages + num_state_pages) + pages)
    checks = bytes(opened[keys_end:])
    parent = parent[:parent_bytes]
    return Record(
        *(offset, keys, parent, num_blocks, place, num_block_pages, checks, num_bytes, number, owner)
    )


def pack_purged(num_bytes: int, offset: int, seal: Seal) -> bytes:
    """Returns what stands at the beginning of a purged record of ``num_bytes`` bytes."""
    data, check = seal.close(offset, PURGED, (num_bytes // ALIGNMENT).to_bytes(4, "little"))
    return _PURGED.pack(_PURGED_MAGIC, bytes(data), 0, check)


def purged_bytes(prefix: bytes, offset: int, seal: Seal) -> int | None:
    """Returns the length of the purged record at ``offset``; None: there is none."""
    if len(prefix) < _PURGED.size:
        return None
    magic, data, _, check = _PURGED.unpack_from(prefix)
    opened = seal.open(offset, PURGED, data, check) if magic == _PURGED_MAGIC else None
    return None if opened is None else int.from_bytes(opened, "little") * ALIGNMENT or None
