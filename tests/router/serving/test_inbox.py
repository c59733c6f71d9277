"""Items that have arrived for a request are taken together, or a slice at a time."""

import asyncio
from functools import partial

import pytest

from router.serving.inbox import Backlog, Inbox


def ignore(_weight):
    pass


async def test_what_has_come_together_is_taken_together():
    inbox = Inbox(ignore)
    inbox.put("a")
    inbox.put("b")
    assert not await inbox.wait()
    assert inbox.take(10) == ["a", "b"]
    waiting = asyncio.create_task(inbox.wait())
    await asyncio.sleep(0)
    assert inbox.is_awaited
    inbox.put("c")
    assert await waiting
    assert inbox.take(10) == ["c"]


def test_a_slice_has_at_least_one_item_and_no_more_than_its_weight():
    inbox = Inbox(ignore)
    for item, weight in [("heavy", 50), ("b", 4), ("c", 4), ("d", 4)]:
        inbox.put(item, weight)
    assert [inbox.take(8) for _ in range(4)] == [["heavy"], ["b", "c"], ["d"], []]
    assert inbox.weight == 0


def test_a_closed_inbox_has_its_last_item_alone():
    backlog = Backlog()
    inbox = Inbox(backlog.changed)
    inbox.put("a", 7)
    inbox.close("last")
    inbox.put("b", 7)
    assert (inbox.weight, backlog.weight) == (1, 1)
    assert inbox.take(100) == ["last"]
    assert backlog.weight == 0


def test_the_heaviest_inbox_is_ended_when_all_together_are_too_heavy():
    backlog, ended = Backlog(100), []
    inboxes = [Inbox(backlog.changed) for _ in range(3)]

    def end(i):
        ended.append(i)
        inboxes[i].close()

    for i, inbox in enumerate(inboxes):
        backlog.add(inbox, partial(end, i))
    inboxes[0].put("a", 30)
    inboxes[1].put("b", 50)
    inboxes[2].put("c", 20)
    assert ended == []
    inboxes[0].put("d", 1)
    assert ended == [1]
    assert backlog.weight == 51
    backlog.remove(inboxes[2])
    assert backlog.weight == 31


@pytest.mark.parametrize("weights", [[1], [5, 9]])
def test_what_is_left_in_an_inbox_leaves_with_its_request(weights):
    backlog = Backlog()
    inbox = Inbox(backlog.changed)
    backlog.add(inbox, inbox.close)
    for weight in weights:
        inbox.put("a", weight)
    assert backlog.weight == sum(weights)
    backlog.remove(inbox)
    assert backlog.weight == 0
