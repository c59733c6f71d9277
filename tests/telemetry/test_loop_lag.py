"""Whether an event loop keeps up."""

import asyncio
import threading

import pytest
from prometheus_client import CollectorRegistry

from telemetry import loop_lag
from telemetry.loop_lag import INTERVAL_S, LIMIT_S, RECENT_S, STARVED_S, LoopLag

LATE_S = 2 * LIMIT_S


@pytest.fixture
async def clock(monkeypatch):
    """The loop's time; it stands unless a test moves it."""
    loop = asyncio.get_running_loop()
    now = [loop.time()]
    plain = loop.time
    monkeypatch.setattr(loop, "time", lambda: now[0])
    yield now
    monkeypatch.setattr(loop, "time", plain)


@pytest.fixture
async def lag(clock):
    made = LoopLag()
    yield made
    made.close()


def looks(lag, clock, lag_s, for_s):
    for _ in range(int(for_s / INTERVAL_S)):
        clock[0] += INTERVAL_S
        lag.saw(lag_s, clock[0])


async def test_one_long_callback_starves_nobody(lag, clock):
    clock[0] += 60.0
    lag.saw(60.0, clock[0])
    assert not lag.is_starved
    looks(lag, clock, 0.001, 5.0)
    assert (lag.is_starved, lag.worst_s) == (False, 60.0)
    looks(lag, clock, 0.001, RECENT_S)
    assert lag.worst_s == 0.001


async def test_a_loop_that_is_late_with_everything_starves_until_it_is_on_time_once(lag, clock):
    looks(lag, clock, LATE_S, STARVED_S)
    assert not lag.is_starved
    looks(lag, clock, LATE_S, 2 * INTERVAL_S)
    assert lag.is_starved
    looks(lag, clock, LIMIT_S, INTERVAL_S)
    assert not lag.is_starved


async def test_a_loop_that_does_not_come_to_its_look_hangs_as_other_threads_see_it(lag, clock):
    seen = []

    def look():
        seen.append(lag.has_hung)

    for passed_s in (0.0, 25.0, 10.0):
        clock[0] += passed_s
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [False, False, True]


async def test_the_loop_looks_by_itself_and_shows_what_it_saw(monkeypatch):
    monkeypatch.setattr(loop_lag, "INTERVAL_S", 0.001)
    registry, lag = CollectorRegistry(), LoopLag()
    registry.register(lag)

    def num_looks():
        return registry.get_sample_value("twinfang_event_loop_lag_seconds_count")

    async with asyncio.timeout(60):
        while num_looks() < 3:
            await asyncio.sleep(0)
    lag.close()
    before = num_looks()
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert num_looks() == before
