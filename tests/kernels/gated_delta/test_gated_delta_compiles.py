"""The Triton kernels of the gated delta rule compile for Hopper without a GPU."""

import pytest

from testing.kernels.compiled import output_of

COMPILE = """
import torch

from kernels.gated_delta import gated_delta_chunk, gated_delta_update
from testing.kernels.sm_90 import compile_kernel

INTEGERS = ("cu_seqlens", "read_slots", "write_slots", "row_starts", "num_before", "seq_lens")
FLOATS = ("A", "dt_bias", "beta", "cumulated", "q_scale", "k_scale")
TYPES = {
    "*": "*" + DTYPE, "scale": "fp32", "norm_eps": "fp32", "has_initial_ptr": "*u8",
    "state_ptr": STATE, "pool_ptr": STATE,
    **{f"{name}_ptr": "*i32" for name in INTEGERS}, **{f"{name}_ptr": "*fp32" for name in FLOATS},
}
dtype = torch.bfloat16 if DTYPE == "bf16" else torch.float32
update = gated_delta_update.tile_request(dtype, torch.float32, 128, 128).default
scan = gated_delta_chunk.tile_request(dtype, 128, 128).default
HEADS = {"HEADS_PER_KEY_HEAD": 2, "BLOCK_K": 128}
DOT = {**HEADS, "PRECISION": "tf32" if DTYPE == "bf16" else "tf32x3"}
IS_NARROW = STATE == "*bf16"
ROUND = {"ROUNDED": IS_NARROW, "STOCHASTIC": IS_NARROW, "GRID": 64}
SOLVE = {"ROUNDED": IS_NARROW, "CHUNK": scan["CHUNK"], "LEVELS": scan["CHUNK"].bit_length() - 1}
KERNELS = [
    (gated_delta_update._update_tiles_kernel, {**HEADS, "NUM_POSITIONS": 2, "STOCHASTIC": IS_NARROW}, update),
    (gated_delta_chunk._solve_chunks_kernel, {**DOT, **SOLVE}, {}),
    (gated_delta_chunk._scan_rows_kernel, {**DOT, **ROUND, "HAS_BOUNDARIES": True}, scan),
]
for kernel, constants, tiles in KERNELS:
    options = {name: value for name, value in tiles.items() if name.startswith("num_")}
    constants = constants | {name: value for name, value in tiles.items() if name not in options}
    compiled = compile_kernel(kernel, constants, TYPES, **options)
    print("compiled", kernel.__name__, compiled.registers, compiled.stack_bytes)
    assert "ld.global.v4.b32" in compiled.ptx  # 16 bytes a load
    if kernel is gated_delta_chunk._scan_rows_kernel:
        # The addresses of the state, from one end of the row to the other; nothing that a chunk needs.
        assert compiled.stack_bytes <= (256 if DTYPE == "bf16" else 1024)
        assert "wgmma.mma_async" in compiled.ptx
        assert "cp.async" in compiled.ptx or DTYPE != "bf16"
    else:
        assert compiled.stack_bytes == 0
"""


@pytest.mark.parametrize(
    ("dtype", "state"),
    [
        ("bf16", "*fp32"),
        pytest.param("fp32", "*fp32", marks=pytest.mark.exhaustive),
        pytest.param("bf16", "*bf16", marks=pytest.mark.exhaustive),  # rounded stochastically
    ],
)
def test_kernels_compile_for_sm_90(dtype, state):
    assert output_of(COMPILE, DTYPE=dtype, STATE=state).count("compiled") == 3
