"""Which blocks and states segments hold, and what goes with what. Keys are beginnings of texts."""

import pytest

from kv_transfer.files.file_index import Contents, FileIndex, runs
from kv_transfer.files.record import Record
from kv_transfer.files.seal import CHECK_BYTES

NUM_STATE_PAGES = 2


def keys(text, start=0):
    return tuple(text[: i + 1].encode() for i in range(start, len(text)))


def record(text, start=0, *, has_state=True, offset=512):
    """The record of a start: the letters of ``text`` from ``start``, and a state."""
    num_pages = len(text) - start + NUM_STATE_PAGES * has_state
    parent = text[:start].encode()
    return Record(
        offset,
        keys(text, start),
        parent,
        len(text),
        3,
        len(text) - start,
        b"x" * CHECK_BYTES * num_pages,
        512,
    )


@pytest.fixture
def index():
    return FileIndex(has_kv=True, has_state=True)


def starts(index, text):
    return [n for n in range(1, len(text) + 1) if index.has_start(text[:n].encode())]


def blocks(index, text):
    return [n for n in range(1, len(text) + 1) if index.has_block(text[:n].encode())]


def test_a_request_can_start_only_behind_a_state(index):
    assert index.add(Contents(), record("abc"))
    assert (blocks(index, "abcd"), starts(index, "abcd")) == ([1, 2, 3], [3])
    assert index.place_of(b"abc") == 3


def test_records_share_the_blocks_before_them(index):
    first, second = Contents(), Contents()
    index.add(first, record("abc"))
    assert index.add(second, record("abde", 2))
    assert starts(index, "abde") == [4]
    pages = index.pages_of(b"abde", keys("abde"), num_state_pages=NUM_STATE_PAGES)
    assert [(page.contents is second, page.number) for page in pages] == [
        *((False, 0), (False, 1), (True, 0), (True, 1), (True, 2), (True, 3))
    ]
    assert [len(run) for run in runs(pages, 100)] == [2, 4]
    assert [len(run) for run in runs(pages, 3)] == [2, 3, 1]


def test_a_state_alone_is_found_behind_blocks_that_the_reader_has(index):
    index.add(Contents(), record("abc"))
    index.add(Contents(), record("ab", 2))
    pages = index.pages_of(b"ab", (), num_state_pages=NUM_STATE_PAGES)
    assert [page.number for page in pages] == [0, 1]
    assert index.pages_of(b"a", (), num_state_pages=NUM_STATE_PAGES) is None


def test_a_record_behind_blocks_that_are_gone_is_of_no_use(index):
    assert not index.add(Contents(), record("abcd", 2))
    assert index.num_blocks == 0


def test_a_state_alone_goes_behind_a_known_block(index):
    index.add(Contents(), record("abc"))
    second = Contents()
    assert index.add(second, record("ab", 2))
    assert starts(index, "abc") == [2, 3]
    index.drop(second)
    assert (blocks(index, "abc"), starts(index, "abc")) == ([1, 2, 3], [3])


def test_with_a_segment_go_all_blocks_that_follow_its_blocks(index):
    first, second, third = Contents(), Contents(), Contents()
    index.add(first, record("abc"))
    index.add(second, record("abde", 2))
    index.add(third, record("xy"))
    index.drop(first)
    assert (blocks(index, "abde"), starts(index, "xy")) == ([], [2])
    assert index.pages_of(b"abde", keys("abde"), num_state_pages=NUM_STATE_PAGES) is None
    index.add(third, record("abde"))
    index.drop(second)
    assert starts(index, "abde") == [4]


@pytest.mark.parametrize(("number", "left", "left_starts"), [(0, [], []), (1, [1], []), (3, [1, 2, 3], [])])
def test_a_damaged_page_takes_along_what_needs_it(index, number, left, left_starts):
    contents = Contents()
    index.add(contents, record("abc"))
    page = index.pages_of(b"abc", keys("abc"), num_state_pages=NUM_STATE_PAGES)[number]
    index.drop_page(page)
    assert (blocks(index, "abc"), starts(index, "abc")) == (left, left_starts)


def test_a_model_without_states_can_start_behind_every_block():
    index = FileIndex(has_kv=True, has_state=False)
    index.add(Contents(), record("abc", has_state=False))
    assert starts(index, "abc") == [1, 2, 3]
    assert len(index.pages_of(b"ab", keys("ab"), num_state_pages=0)) == 2


def test_a_model_without_kv_needs_the_state_alone():
    index = FileIndex(has_kv=False, has_state=True)
    one = Record(512, (b"abc",), b"", 3, 0, 0, b"x" * CHECK_BYTES, 512)
    assert index.add(Contents(), one)
    assert [page.number for page in index.pages_of(b"abc", [b"abc"], num_state_pages=1)] == [0]
