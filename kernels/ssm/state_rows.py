"""What the recurrences of decode rows on CPU need of vector registers beyond :mod:`kernels.cpu.vector`.

| operator | meaning |
|---|---|
| `advance_rows(source, s, stride, target, t, …)` | advance lanes() rows of an SSM state by one token; h C |
| `advance_4_rows(source, s, stride, target, t, …)` | the same for 4 rows; the other lanes are 0 |
| `read_half(source, s, stride, …)` | S k, then S q, of lanes() / 2 rows of a delta state |
| `solve_half(sums, decay, beta, kq, v, at, y, out)` | from these the rows' changes; stores their outputs |
| `update_half(source, s, stride, target, t, …)` | decay S + changes k^T, for these rows |
| `update_and_read_half(source, s, stride, target, …)` | `update_half`, then `read_half` for the next token |

Row p of the old state is ``source[s + p * stride :][:whole]``, row p of the new one begins at
``target[t + p * target_stride]``. Both may be one array. ``whole`` is the number of columns, a multiple of
lanes(), out of ``width``. Lane p belongs to row p. A vector of S k and S q has the rows' sums in its two
halves; one of changes has them in both halves.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from pathlib import Path
from typing import Any

from kernels.cpu import vector
from kernels.cpu.compiler import CpuIntrinsic


class StateOperator(CpuIntrinsic):
    """The function of this name in state_ir.py, which is imported when the first kernel compiles."""

    def __init__(self, name: str) -> None:
        self.name = name

    @functools.cached_property
    def dispatcher(self) -> Any:
        return getattr(importlib.import_module("kernels.ssm.state_ir"), self.name)

    @functools.cached_property
    def _digest(self) -> int:
        return zlib.crc32(Path(__file__).with_name("state_ir.py").read_bytes(), vector.load._digest)


advance_rows = StateOperator("advance_rows")
advance_4_rows = StateOperator("advance_4_rows")
read_half = StateOperator("read_half")
solve_half = StateOperator("solve_half")
update_half = StateOperator("update_half")
update_and_read_half = StateOperator("update_and_read_half")
