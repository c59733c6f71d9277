"""One vector register in CPU kernels: 16 float32 with AVX-512, 8 without.

LLVM vectorizes a plain loop. But by itself it neither keeps a block of a product in registers across another
loop nor uses the widest registers. With this module a kernel does both explicitly:

    acc = load(out, 0)
    for k in range(depth):
        acc = multiply_add(splat(a[k]), load(b, k * lanes()), acc)
    store(out, 0, acc)

Arrays are flat. An index counts elements, and all elements accessed must be within the array. uint16 stands
for bfloat16 and uint8 for float8_e4m3fn: loads widen them, and stores round to e4m3
(kernels/formats/float8.py).

| operator | meaning |
|---|---|
| `lanes()` | the number of elements (SIMD lanes) of a vector; a constant |
| `load(array, index)`, `store(array, index, vector)` | a vector's elements, at any alignment |
| `load_3(array, index)`, `load_4(array, index)` | 3 or 4 vectors; their elements alternate in memory |
| `store_3(array, index, a, b, c)` | three vectors, so that their elements alternate |
| `load_number(array, index)`, `store_number(array, index, number)` | one element |
| `prefetch(array, index)` | fetch the element's line to the second-level cache; may be out of bounds |
| `splat(number)`, `broadcast(array, index)` | a vector with the number, or the element, in all lanes |
| `add`, `subtract`, `multiply`, `divide` | lane by lane |
| `multiply_add(a, b, c)` | a b + c, lane by lane, rounded once in every compilation |
| `multiply_add_number(a, b, c)` | a b + c of numbers, rounded once in every compilation of a loop |
| `maximum(a, b)` | lane by lane; b if either is NaN |
| `exponential(vector)` | e^x, lane by lane; 0 below -87.68, e^88 above 88, NaN for NaN |
| `silu(vector)` | x / (1 + e^-x), lane by lane |
| `sum_of(vector)`, `largest_of(vector)` | one number, computed in a fixed order |
| `rounding_key(layer_seed, head, position)` | the key of stochastic_round.py; an integer |
| `rounded(pool, vector, is_stochastic, key, element, stride)` | the vector rounded as the pool stores it |
| `rounded_number(pool, number, is_stochastic, key, element)` | the same for one number |
| `row_sums(array, index)` | lane i: the sum of the i-th of lanes() adjacent vectors |
| `transpose(source, index, row_stride, target, index, row_stride)` | a block of lanes() by lanes() |
"""

from __future__ import annotations

import functools
import importlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from kernels.cpu.compiler import CpuIntrinsic, cpu_function
from kernels.formats import stochastic_round

_IR_MODULES = "vector_ir.py", "exponential_ir.py", "format_ir.py"


class VectorOperator(CpuIntrinsic):
    """The function of this name in vector_ir.py, which is imported when the first kernel compiles."""

    def __init__(self, name: str) -> None:
        self.name = name

    @functools.cached_property
    def dispatcher(self) -> Any:
        return getattr(importlib.import_module("kernels.cpu.vector_ir"), self.name)

    @functools.cached_property
    def _digest(self) -> int:
        here = (Path(__file__).with_name(name) for name in _IR_MODULES)
        sources = (*here, Path(stochastic_round.__file__))
        return zlib.crc32(b"".join(source.read_bytes() for source in sources))


lanes = VectorOperator("lanes")
load = VectorOperator("load")
store = VectorOperator("store")
load_number = VectorOperator("load_number")
store_number = VectorOperator("store_number")
prefetch = VectorOperator("prefetch")
broadcast = VectorOperator("broadcast")
splat = VectorOperator("splat")
add = VectorOperator("add")
subtract = VectorOperator("subtract")
multiply = VectorOperator("multiply")
divide = VectorOperator("divide")
multiply_add = VectorOperator("multiply_add")
multiply_add_number = VectorOperator("multiply_add_number")
maximum = VectorOperator("maximum")
exponential = VectorOperator("exponential")
silu = VectorOperator("silu")
sum_of = VectorOperator("sum_of")
largest_of = VectorOperator("largest_of")
load_3 = VectorOperator("load_3")
load_4 = VectorOperator("load_4")
store_3 = VectorOperator("store_3")
row_sums = VectorOperator("row_sums")
transpose = VectorOperator("transpose")
rounding_key = VectorOperator("rounding_key")
rounded = VectorOperator("rounded")
rounded_number = VectorOperator("rounded_number")

_LINE_FLOATS = 16


@cpu_function
def aligned(count):
    """Return uninitialized floats that start at a cache line. A load across two lines takes twice as long."""
    floats = np.empty(count + _LINE_FLOATS, np.float32)
    first = (-floats.ctypes.data // 4) % _LINE_FLOATS
    return floats[first : first + count]


@cpu_function
def clear_columns(array, first, end, stride, column, count):
    """Clear ``count`` columns of the rows ``first`` to ``end``, which lie ``stride`` apart."""
    for row in range(first, end):
        array[row * stride + column : row * stride + column + count] = 0
