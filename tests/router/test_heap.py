"""What is kept takes the memory that it needs."""

import tracemalloc

import orjson

from router.heap import fitted
from testing.router.tokenizers import byte_level


def traced_bytes(make, count):
    """Return the memory of what ``make`` returns for each number."""
    tracemalloc.start()
    try:
        kept = [make(number) for number in range(count)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == count
    return size


def test_json_that_is_kept_takes_no_more_than_its_bytes():
    assert traced_bytes(lambda number: fitted(orjson.dumps(str(number))), 1000) < 100_000


def test_the_json_of_tokens_takes_little():
    tokenizer = byte_level()
    assert traced_bytes(tokenizer.own_json, 200) < 200 * 500, "orjson's own objects take 4 KB each"
