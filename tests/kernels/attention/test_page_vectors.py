import numpy as np
import pytest

from kernels.attention.page_vectors import (
    order_pages,
    score_page,
    score_pages_1,
    score_pages_2,
    score_pages_3,
)
from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import lanes

PAGE_TOKENS = 16


@cpu_jit
def _lanes(out):
    out[0] = lanes()


@cpu_jit
def _page_by_page(queries, num_queries, keys, places, stride, width, scores):
    step = places.shape[0] * PAGE_TOKENS
    for t in range(0, step, lanes()):
        place = places[t // PAGE_TOKENS] + t % PAGE_TOKENS * stride
        for i in range(num_queries):
            q, s = 1 + i * width, i * step + t
            score_page(queries, q, keys, place, stride, width, scores, s, 64, 16, 32)


@cpu_jit
def _all_pages(queries, num_queries, keys, places, stride, width, scores):
    for t in range(0, PAGE_TOKENS, 2):
        o, s = t * stride, t // 2 * lanes()
        if num_queries == 1:
            score_pages_1(queries, 1, keys, places, o, stride, width, scores, s, 64, 0, width)
        elif num_queries == 2:
            score_pages_2(queries, 1, keys, places, o, stride, width, scores, s, 64, 0, width)
        else:
            score_pages_3(queries, 1, keys, places, o, stride, width, scores, s, 64, 0, width)
    for i in range(num_queries):
        order_pages(scores, i * places.shape[0] * PAGE_TOKENS)


@pytest.mark.parametrize("num_queries", [1, 2, 3])
def test_scores_have_the_same_bits_page_by_page_and_of_all_pages_together(num_queries):
    found = np.zeros(1, np.int64)
    _lanes(found)
    pages = int(found[0]) // 2
    width, stride = 48, 53
    random = np.random.default_rng(7)
    sizes = 1 + num_queries * width, 2 + pages * PAGE_TOKENS * stride
    queries, keys = (random.standard_normal(size).astype(np.float32) for size in sizes)
    places = 2 + random.permutation(pages).astype(np.int64) * PAGE_TOKENS * stride
    scores = np.zeros((2, num_queries, pages * PAGE_TOKENS), np.float32)
    _page_by_page(queries, num_queries, keys, places, stride, width, scores[0].reshape(-1))
    _all_pages(queries, num_queries, keys, places, stride, width, scores[1].reshape(-1))
    rows = np.stack(
        [keys[place : place + PAGE_TOKENS * stride].reshape(PAGE_TOKENS, stride) for place in places]
    )[:, :, :width]
    expected = queries[1:].reshape(num_queries, width) @ rows.reshape(-1, width).T
    np.testing.assert_allclose(scores[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(scores[1], scores[0])


def test_a_tokens_score_is_the_same_in_every_lane():
    query, token = (np.random.default_rng(7).standard_normal(size).astype(np.float32) for size in (33, 32))
    scores = np.zeros(PAGE_TOKENS, np.float32)
    _page_by_page(query, 1, np.tile(token, PAGE_TOKENS), np.zeros(1, np.int64), 32, 32, scores)
    assert (scores == scores[0]).all()
