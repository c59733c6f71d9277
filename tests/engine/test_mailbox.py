"""Callbacks from other threads to an event loop."""

from __future__ import annotations

import asyncio
import threading

from engine.mailbox import Mailbox


def test_callbacks_of_several_threads_arrive_once_and_in_each_threads_order():
    async def main() -> list[tuple[int, int]]:
        loop = asyncio.get_running_loop()
        mailbox, found, done = Mailbox(loop), [], asyncio.Event()

        def take(thread: int, number: int) -> None:
            found.append((thread, number))
            if len(found) == 4000:
                done.set()

        def post(thread: int) -> None:
            for number in range(1000):
                mailbox.post(take, thread, number)

        threads = [threading.Thread(target=post, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(30):
            await done.wait()
        for thread in threads:
            thread.join()
        mailbox.close()
        mailbox.post(take, 9, 9)
        return found

    found = asyncio.run(main())
    assert [[number for thread, number in found if thread == i] for i in range(4)] == [list(range(1000))] * 4


def test_a_callback_that_raises_takes_no_other_along():
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        mailbox, found, errors = Mailbox(loop), asyncio.Queue(), []
        loop.set_exception_handler(lambda _, context: errors.append(type(context["exception"]).__name__))
        mailbox.post(lambda: 1 / 0)
        mailbox.post(found.put_nowait, "next")
        async with asyncio.timeout(30):
            errors.append(await found.get())
        mailbox.close()
        return errors

    assert asyncio.run(main()) == ["ZeroDivisionError", "next"]
