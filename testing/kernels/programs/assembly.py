"""Compiles a recorded program, disassembles it and counts what tells whether a GPU would run it well."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import triton
from triton.compiler import ASTSource

from testing.kernels.programs.recorder import Program

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
WIDE_PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
"""Each architecture's instruction for products of large tiles of 16-bit numbers."""


INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE
)  # /*04b0*/ @!P1 STL [R1+0x5c], R170 ;


class Instruction(NamedTuple):
    """One line of a disassembled program."""

    address: int
    opcode: str
    operands: str

    @property
    def is_local(self) -> bool:
        return self.opcode.split(".")[0] in ("LDL", "STL")


@dataclass(frozen=True)
class Figures:
    """Registers and ``stack_bytes`` are per thread, ``shared_bytes`` per program."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    local_accesses: int
    """Instructions that load or store spilled registers."""
    looped_local_accesses: int
    """Those in a loop that has no loop inside."""
    wide_products: int
    narrow_copies: int
    """Asynchronous copies of 4 bytes a thread."""
    wide_copies: int
    """Asynchronous copies of 8 or 16 bytes a thread."""


def figures(program: Program) -> Figures:
    """Compiles the program."""
    source = ASTSource(program.kernel, program.signature, program.constants, program.attributes)
    compiled = triton.compile(source, target=program.target, options=program.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", cubin.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert usage, listing[:2000]
    instructions = [Instruction(int(at, 16), *rest) for at, *rest in INSTRUCTION.findall(listing)]
    assert instructions, listing[:2000]
    opcodes = Counter(instruction.opcode for instruction in instructions)
    local = [instruction.address for instruction in instructions if instruction.is_local]
    copies = {opcode: count for opcode, count in opcodes.items() if opcode.startswith("LDGSTS")}
    wide = sum(count for opcode, count in copies.items() if {"64", "128"} & set(opcode.split(".")))
    return Figures(
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=compiled.metadata.shared,
        local_accesses=len(local),
        looped_local_accesses=sum(
            first <= address <= last for address in local for first, last in innermost_loops(instructions)
        ),
        wide_products=sum(
            count
            for opcode, count in opcodes.items()
            if opcode.split(".")[0] == WIDE_PRODUCTS[program.target.arch]
        ),
        narrow_copies=sum(copies.values()) - wide,
        wide_copies=wide,
    )


def innermost_loops(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Returns the first and last addresses of loops without a loop inside. A branch back ends a loop."""
    loops = []
    for instruction in instructions:
        target = re.search(r"0x([0-9a-f]+)", instruction.operands)
        if instruction.opcode.split(".")[0] == "BRA" and target:
            first = int(target[1], 16)
            if first < instruction.address:  # a branch to itself is the end of the code
                loops.append((first, instruction.address))
    return [
        one
        for one in loops
        if not any(one != other and one[0] <= other[0] <= other[1] <= one[1] for other in loops)
    ]
