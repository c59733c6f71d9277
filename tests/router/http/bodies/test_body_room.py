"""Memory of large bodies is returned when their requests have ended, not only when they have been read."""

import asyncio
import subprocess
import sys

from router.http.bodies.body_room import FREE_BYTES, BodyRoom, BodyShare


async def test_the_heap_is_trimmed_after_a_request_with_a_large_body_ends():
    room = BodyRoom(1 << 20)
    small, large = BodyShare(room, "a"), BodyShare(room, "a")
    small.take(FREE_BYTES)
    large.take(FREE_BYTES + 1)
    large.give_back()
    small.end()
    assert room._trim is None, "its parsed form still lives"
    large.end()
    first = room._trim
    assert first is not None
    assert first.when() > asyncio.get_running_loop().time()
    other = BodyShare(room, "b")
    other.take(FREE_BYTES + 1)
    other.end()
    assert room._trim is first, "clients that send on and on do not put it off"
    assert room.num_bytes == 0
    first.cancel()


A_LARGE_PIECE = """
import ctypes
from router.heap import keep_small

def resident_bytes():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096

keep_small()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
for _ in range(3):
    before, size = resident_bytes(), 24 << 20
    pieces = [libc.malloc(1 << 20) for _ in range(size >> 20)]
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 20)
    assert resident_bytes() - before > size * 0.9
    for piece in reversed(pieces):
        libc.free(piece)
    assert resident_bytes() - before < size * 0.1
"""


def test_a_large_piece_is_returned_as_soon_as_it_is_free():
    """In a process of its own: one that has run other tests has free memory, which it would use first."""
    ended = subprocess.run([sys.executable, "-c", A_LARGE_PIECE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
