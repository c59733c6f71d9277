"""What the CPU's sampling needs of vector registers beyond :mod:`kernels.cpu.vector`.

| operator | meaning |
|---|---|
| `noise_bound(key, token)` | at least -log2(u), of `token` and the tokens behind it, by coarse noise |
| `where_at_least(values, least, a, b)` | a lane of a where the value is at least `least`, else b |
| `lanes_at_least(vector, number)`, `lanes_equal(vector, number)` | one bit for each lane; an integer |
| `count_at_least(vector, number)` | number of such lanes |
| `first_lane(mask)` | the lowest lane of a mask that is not 0 |
| `array_at(address, count, like)` | the elements at an address as an array of the type of the array `like` |
"""

from __future__ import annotations

import functools
import importlib
import zlib
from pathlib import Path
from typing import Any

from kernels.cpu import vector
from kernels.cpu.compiler import CpuIntrinsic
from kernels.sampling import noise


class RaceOperator(CpuIntrinsic):
    """The function of this name in race_ir.py, which is imported when the first kernel compiles."""

    def __init__(self, name: str) -> None:
        self.name = name

    @functools.cached_property
    def dispatcher(self) -> Any:
        return getattr(importlib.import_module("kernels.sampling.race_ir"), self.name)

    @functools.cached_property
    def _digest(self) -> int:
        here = Path(__file__).with_name("race_ir.py"), Path(noise.__file__)
        return zlib.crc32(b"".join(source.read_bytes() for source in here), vector.load._digest)


noise_bound = RaceOperator("noise_bound")
where_at_least = RaceOperator("where_at_least")
lanes_at_least = RaceOperator("lanes_at_least")
lanes_equal = RaceOperator("lanes_equal")
count_at_least = RaceOperator("count_at_least")
first_lane = RaceOperator("first_lane")
array_at = RaceOperator("array_at")
