"""Those who wait for a page share the next one, and nobody gets one that is older than the request."""

import asyncio
from itertools import pairwise

import pytest

from router.api import shared_page
from router.api.shared_page import SharedPage


class Builder:
    """Builds numbered pages, each once it is told to."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.goes_on = asyncio.Semaphore(0)

    async def __call__(self) -> bytes:
        self.num_begun += 1
        number = self.num_begun
        await self.goes_on.acquire()
        if number == 3:
            raise ValueError("no page")
        return b"%d" % number


async def begun(builder: Builder, number: int) -> None:
    while builder.num_begun < number:
        await asyncio.sleep(0)


async def test_who_waits_shares_the_next_page_and_a_failure_ends_with_it(monkeypatch):
    monkeypatch.setattr(shared_page, "MAX_REST_S", 0.01)
    builder = Builder()
    page = SharedPage(builder)
    first = asyncio.create_task(page.get("a"))
    await begun(builder, 1)
    others = [asyncio.create_task(page.get(client)) for client in "abcab"]
    await asyncio.sleep(0)
    others[0].cancel()  # nobody else notices
    builder.goes_on.release()
    assert await first == b"1"
    builder.goes_on.release()
    assert await asyncio.gather(*others[1:]) == [b"2"] * 4, "they came after the first page was begun"
    builder.goes_on.release()
    with pytest.raises(ValueError, match="no page"):
        await page.get("a")
    builder.goes_on.release()
    assert await page.get("a") == b"4"


async def test_between_pages_is_a_rest_of_many_times_their_length():
    loop = asyncio.get_running_loop()
    times = []

    async def build() -> bytes:
        began_s = loop.time()
        while loop.time() < began_s + 0.002:
            pass
        times.append((began_s, loop.time()))
        return b"page"

    page = SharedPage(build)
    for _ in range(5):
        await asyncio.gather(*(page.get(str(client)) for client in range(50)))
    assert len(times) == 5
    for (began_s, ended_s), (next_s, _) in pairwise(times):
        assert next_s - ended_s >= min(shared_page.REST * (ended_s - began_s), shared_page.MAX_REST_S) - 1e-3
