"""The log of requests: what it keeps of those that have ended, and how much memory that takes."""

import gc
import subprocess
import sys

import pytest

from router.access.api_keys import ApiKey
from router.access.client import Client
from router.admin.views.request import RequestDetail
from router.observe.request_log import MAX_ENDED, MAX_ENDED_BYTES, RequestLog
from router.observe.request_record import RequestRecord
from wire.errors import AbortedRequestError, OverloadedError
from wire.messages.generation import RequestStats


def begun(log: RequestLog, request_id: str, *, num_choices: int = 1) -> RequestRecord:
    record = RequestRecord(
        request_id,
        "tiny",
        num_prompt_tokens=7,
        num_choices=num_choices,
        count_tokens=lambda: 3 * num_choices,
        priority=-2,
        client=Client("key mine", ApiKey("mine", b"d" * 32)),
    )
    log.began(record)
    record.admitted(lambda error: None)
    for choice in record.choices:
        choice.prefill_called("prefill-127.0.0.1:1")
        choice.prefilled(queue_s=0.001, prefill_s=0.002)
        choice.submitted("decode-127.0.0.1:2", reads=True)
        choice.retried("unavailable")
        choice.submitted("decode-127.0.0.1:3", reads=False)
        choice.progressed()
        choice.ended(RequestStats(0.001, 0.002, 1000, 3, 0))
    return record


def detail(record: RequestRecord | None) -> RequestDetail:
    assert record is not None
    return RequestDetail.of(record, 0.0, 1).model_copy(update={"received_at": 0.0})  # reads the clock


@pytest.mark.parametrize("error", [None, AbortedRequestError.by_operator(), KeyboardInterrupt()])
def test_an_ended_request_is_shown_as_it_was(error):
    log = RequestLog()
    record = begun(log, 'a "request"', num_choices=2)
    log.ended(record, error)
    assert detail(log.find('a "request"')) == detail(record)
    (newest,) = log.newest(5)
    assert (detail(newest), newest.abort(AbortedRequestError.by_operator())) == (detail(record), False)


def test_the_newest_of_one_id_is_found_and_the_oldest_are_dropped():
    log = RequestLog()
    for i in range(MAX_ENDED + 3):
        log.ended(begun(log, f"id-{i % 8}"), OverloadedError("full", retry_after_s=1) if i == 5 else None)
    assert (log.num_ended, len(log.last_ended(2 * MAX_ENDED))) == (MAX_ENDED + 2, MAX_ENDED)
    last = begun(log, "id-1")
    log.ended(last, None)
    assert detail(log.find("id-1")) == detail(last)
    assert log.find("id") is None


def test_requests_of_many_choices_are_bounded_by_their_bytes():
    log = RequestLog()
    for i in range(80):
        log.ended(begun(log, f"id-{i}", num_choices=128), None)
    kept = log.last_ended(MAX_ENDED)
    assert 0 < len(kept) < 80
    assert sum(len(record.packed()) for record in kept) <= MAX_ENDED_BYTES
    assert kept[0].id == "id-79"


def test_an_ended_request_is_one_large_piece_of_memory():
    """Small objects that are made while a large body is parsed keep the body's memory from being given
    back. Counted in a process of its own, where nothing else makes objects."""
    ended = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert len(RequestRecord("", "", num_prompt_tokens=1, num_choices=0, count_tokens=int).packed()) >= 512


def count_blocks() -> None:
    log = RequestLog()
    num_first = MAX_ENDED // 4  # these fill Python's lists of free objects
    for i in range(num_first):
        log.ended(begun(log, f"id-{i}"), None)
    gc.collect()
    before = sys.getallocatedblocks()
    for i in range(num_first, MAX_ENDED):
        log.ended(begun(log, f"id-{i}"), None)
    gc.collect()
    num_new = sys.getallocatedblocks() - before
    assert len(log.last_ended(MAX_ENDED)) == MAX_ENDED
    assert num_new < 1.2 * (MAX_ENDED - num_first), f"{num_new} blocks"


if __name__ == "__main__":
    count_blocks()
