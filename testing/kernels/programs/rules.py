"""What a program must and must not contain.

| rule | amount | why |
|---|---|---|
| spills | bytes of stack per thread | spilled registers are written to memory and read back |
| spills in a loop | loads and stores of them | in an innermost loop they cost in every round |
| wide products | 1 if there is none | only the widest instructions reach the tensor cores' rate |
| narrow copies | copies of 4 bytes | 16 bytes a thread take a quarter of the instructions |

The rules on spills hold for every kernel, the others for products of 16-bit tiles of at least 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from testing.kernels.programs.assembly import Figures
from testing.kernels.programs.exemptions import EXEMPTIONS, Exemption
from testing.kernels.programs.recorder import Program

SPILLS, SPILLS_IN_A_LOOP = "spills", "spills in a loop"
WIDE_PRODUCTS, NARROW_COPIES = "wide products", "narrow copies"
ROWS_OF_TILE = {
    "paged_attention_prefill._prefill_kernel": "BLOCK_M",
    "ssd_chunk_scan._scan_rows_kernel": "CHUNK",
    "gated_delta_chunk._solve_chunks_kernel": "CHUNK",
    "gated_delta_chunk._scan_rows_kernel": "CHUNK",
    "quantized_linear._quantized_linear_kernel": "BLOCK_M",
    "quantized_experts._quantized_experts_kernel": "BLOCK_M",
}
"""The constant that is the number of rows of a kernel's products."""
WIDE_ROWS = 64
"""The least number of rows that wgmma (sm_90) and tcgen05 (sm_100) multiply at once."""


@dataclass(frozen=True)
class Fault:
    """A rule that a program breaks, and by how much."""

    rule: str
    amount: int


def faults(program: Program, figures: Figures) -> Iterator[Fault]:
    """Yields the rules that the program breaks, exemptions included."""
    if figures.stack_bytes or figures.local_accesses:
        yield Fault(SPILLS, max(figures.stack_bytes, 4 * bool(figures.local_accesses)))
    if figures.looped_local_accesses:
        yield Fault(SPILLS_IN_A_LOOP, figures.looped_local_accesses)
    if multiplies_wide_tiles(program):
        if figures.wide_products == 0:
            yield Fault(WIDE_PRODUCTS, 1)
        if figures.narrow_copies:
            yield Fault(NARROW_COPIES, figures.narrow_copies)


def multiplies_wide_tiles(program: Program) -> bool:
    """Whether the program's products have enough rows, of 16 bits, for the widest instructions."""
    if program.name not in ROWS_OF_TILE or not program.has_narrow_inputs:
        return False
    names = program.kernel.arg_names
    constants = {names[path[0]]: value for path, value in program.constants.items()}
    return bool(constants[ROWS_OF_TILE[program.name]] >= WIDE_ROWS) and constants.get("SCALES") != "each"


def exemption_for(kernel: str, architecture: int, triton: str, fault: Fault) -> Exemption | None:
    """Returns the exemption that allows the fault. ``triton`` is a version such as 3.6.0."""
    for entry in EXEMPTIONS:
        if (entry.kernel, entry.rule) == (kernel, fault.rule) and applies(entry, architecture, triton):
            return entry if fault.amount <= entry.at_most else None
    return None


def applies(entry: Exemption, architecture: int, triton: str) -> bool:
    return architecture in entry.architectures and any(
        triton.startswith(f"{minor}.") for minor in entry.tritons
    )
