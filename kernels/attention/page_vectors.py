"""What the CPU's attention needs of vector registers beyond :mod:`kernels.cpu.vector`.

A page is the keys or values of 16 adjacent tokens of a block. A step of a decode row is lanes() / 2 pages.

| operator | meaning |
|---|---|
| `score_page(queries, q, keys, place, stride, width, scores, s, ahead, begin, end)` | one query |
| `score_pages_2(queries, q, keys, places, offset, stride, width, scores, s, ...)` | 1/8 of each page |
| `order_pages(scores, index)` | put the results of `score_pages` in the order of `score_page`'s |
| `add_pages_2(weights, p, values, places, stride, acc, a, width, ahead, bounds)` | acc += weights . values |
| `product_rows()` | the number of rows of a product: 4 with AVX-512, 6 without; a constant |
| `multiply_2(a, i, row, b, j, stride, depth, c, k, width, adds)` | c = a b, or c += a b if it `adds` |

`score_page` stores lanes() scores: lane t is the query's product with token t. `score_pages_2` takes
two tokens of each page, the first of them at `offset`. It is for two queries, `score_pages_1` and
`score_pages_3` are for one and three. A query is a width after the one before it, its scores a step after.
The width is a multiple of 16. All of them add up in the same order. Meanwhile they prefetch what is `ahead`
elements after columns `begin : end` of each token.

`add_pages_2` is for two queries, `add_pages_1` and `add_pages_3` are for one and three. A query's weights are
a step after those of the query before it, its sums a width after. The bounds are `first, last, count, begin,
end`. Tokens `first : last` of each page are added, as far as they are among the step's first `count` tokens:
one token of each page in turn. Meanwhile the same tokens of pages `begin : end` at `ahead` are prefetched.

`multiply_2` computes two vectors of each row, `multiply_4` four, which need the 32 registers of AVX-512. The
rows of a, b and c begin at i, j and k and lie `row`, `stride` and `width` apart.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from pathlib import Path
from typing import Any

from kernels.cpu import vector
from kernels.cpu.compiler import CpuIntrinsic


class PageOperator(CpuIntrinsic):
    """The function of this name in page_ir.py, which is imported when the first kernel compiles."""

    def __init__(self, name: str) -> None:
        self.name = name

    @functools.cached_property
    def dispatcher(self) -> Any:
        return getattr(importlib.import_module("kernels.attention.page_ir"), self.name)

    @functools.cached_property
    def _digest(self) -> int:
        return zlib.crc32(Path(__file__).with_name("page_ir.py").read_bytes(), vector.load._digest)


score_page = PageOperator("score_page")
score_pages_1 = PageOperator("score_pages_1")
score_pages_2 = PageOperator("score_pages_2")
score_pages_3 = PageOperator("score_pages_3")
order_pages = PageOperator("order_pages")
add_pages_1 = PageOperator("add_pages_1")
add_pages_2 = PageOperator("add_pages_2")
add_pages_3 = PageOperator("add_pages_3")
product_rows = PageOperator("product_rows")
multiply_2 = PageOperator("multiply_2")
multiply_4 = PageOperator("multiply_4")
