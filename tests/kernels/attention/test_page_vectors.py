import numpy as np

from kernels.attention.page_vectors import dot_page, dot_pages, order_pages
from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import lanes, store

PAGES = 8


@cpu_jit
def _lanes(out):
    out[0] = lanes()


@cpu_jit
def _page_by_page(a, b, places, stride, depth, scores):
    w = lanes()
    for page in range(places.shape[0]):
        store(scores, page * w, dot_page(a, 1, b, places[page], stride, depth, 64, w, 2 * w))


@cpu_jit
def _all_pages(a, b, places, stride, depth, scores):
    w = lanes()
    together = w // places.shape[0]
    for t in range(0, w, together):
        row = dot_pages(a, 1, b, places, t * stride, stride, depth, 64, 0, depth)
        store(scores, t // together * w, row)
    order_pages(scores, 0)


def test_scores_have_the_same_bits_page_by_page_and_of_all_pages_together():
    found = np.zeros(1, np.int64)
    _lanes(found)
    w = int(found[0])
    depth, stride = 3 * w, 3 * w + 5
    random = np.random.default_rng(7)
    a, b = (random.standard_normal(size).astype(np.float32) for size in (1 + depth, 2 + PAGES * w * stride))
    places = 2 + random.permutation(PAGES).astype(np.int64) * w * stride
    scores = np.zeros((2, PAGES * w), np.float32)
    _page_by_page(a, b, places, stride, depth, scores[0])
    _all_pages(a, b, places, stride, depth, scores[1])
    rows = np.stack([b[place : place + w * stride].reshape(w, stride) for place in places])[:, :, :depth]
    np.testing.assert_allclose(scores[0], (rows @ a[1:]).ravel(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(scores[1], scores[0])


def test_a_tokens_score_is_the_same_in_every_lane():
    found = np.zeros(1, np.int64)
    _lanes(found)
    w = int(found[0])
    a, token = (np.random.default_rng(7).standard_normal(size).astype(np.float32) for size in (1 + w, w))
    scores = np.zeros(w, np.float32)
    _page_by_page(a, np.tile(token, w), np.zeros(1, np.int64), w, w, scores)
    assert (scores == scores[0]).all()
