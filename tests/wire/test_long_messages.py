"""Long messages are read beside the event loop, one at a time."""

import asyncio
import threading

from wire.rpc import LONG_BYTES, read_long


async def test_a_short_message_is_read_at_once_and_long_ones_in_one_other_thread():
    threads = []

    def read(data):
        threads.append(threading.current_thread())
        return len(data)

    assert await read_long(read, b"a" * LONG_BYTES) == LONG_BYTES
    sizes = [LONG_BYTES + i for i in range(1, 9)]
    assert await asyncio.gather(*(read_long(read, b"a" * size) for size in sizes)) == sizes
    assert threads[0] is threading.current_thread()
    assert len(set(threads[1:])) == 1
    assert threads[1] is not threads[0]


async def test_the_event_loop_goes_on_while_a_long_message_is_read():
    goes_on = threading.Event()

    def read(data):
        return goes_on.wait(60)

    reading = asyncio.create_task(read_long(read, b"a" * (LONG_BYTES + 1)))
    await asyncio.sleep(0)
    goes_on.set()
    assert await reading
