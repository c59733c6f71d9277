"""Compiles a Triton kernel for Hopper without a Hopper GPU, in processes that don't interpret kernels
(compiled.py)."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. ``stack_bytes`` per thread are spilled registers."""

    ptx: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    ttgir: str


def compile_kernel(kernel, constants, types, *, others="i32", num_warps=4, num_stages=3) -> Compiled:
    """Compiles a kernel. ``types`` gives arguments' types by name. Pointers that it does not name have the
    type ``types["*"]``, all other arguments ``others``.

    Pointers and integers count as multiples of 16, as for a model's tensors.
    """
    names = kernel.arg_names
    kinds = {
        name: types.get(name, types["*"] if name.endswith("_ptr") else others)
        for name in names
        if name not in constants
    }
    signature = {name: kinds.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if kinds.get(name, "").startswith(("*", "i"))
    }
    known = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    counts = int(found[1]), int(found[2]), compiled.metadata.shared
    return Compiled(compiled.asm["ptx"], *counts, compiled.asm["ttgir"])
