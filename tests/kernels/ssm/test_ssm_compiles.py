"""The Triton kernels of the Mamba ops compile for Hopper without a GPU: the interpreter checks no types."""

import pytest

from testing.kernels.compiled import output_of

COMPILE = """
import torch

from kernels.ssm import causal_conv1d, selective_state_update, ssd_chunk_scan
from testing.kernels.sm_90 import compile_kernel

INTEGERS = ("cu_seqlens", "read_slots", "write_slots", "row_starts", "num_before", "seq_lens")
FLOATS = ("A", "D", "dt_bias", "step", "cumulated")
TYPES = {
    "*": "*" + DTYPE, "dt_min": "fp32", "dt_max": "fp32", "has_initial_ptr": "*u8", "pool_ptr": STATE,
    "state_ptr": STATE,
    **{f"{name}_ptr": "*i32" for name in INTEGERS}, **{f"{name}_ptr": "*fp32" for name in FLOATS},
    **{f"boundary_{name}_ptr": "*i32" for name in ("rows", "offsets", "slots")},
}
dtype = torch.bfloat16 if DTYPE == "bf16" else torch.float32
update = selective_state_update.tile_request(dtype, torch.float32, 64, 128).default
scan = ssd_chunk_scan.tile_request(dtype, 64, 128).default
prefill = causal_conv1d.prefill_tile_request(dtype, 4).default
decode = causal_conv1d.decode_tile_request(dtype, 4, 2).default
STOCHASTIC = {"STOCHASTIC": STATE == "*bf16"}
GROUPS = {"HEADS_PER_GROUP": 16, "BLOCK_N": 128}
PRECISION = "tf32" if DTYPE == "bf16" else "tf32x3"
CONV = {"HAS_BIAS": True, "NUM_TAPS": 4, "TAPS": 4}
KERNELS = [
    (
        ssd_chunk_scan._cumulate_decay_kernel,
        {"CHUNK": scan["CHUNK"], "BLOCK_H": 16, "ROUNDED": STATE == "*bf16"}, {},
    ),
    (
        ssd_chunk_scan._scan_rows_kernel,
        {
            **GROUPS, **STOCHASTIC, "HAS_BOUNDARIES": True, "PRECISION": PRECISION, "GRID": 64,
            "ROUNDED": STATE == "*bf16",
        }, scan,
    ),
    (selective_state_update._update_tiles_kernel, {**GROUPS, **STOCHASTIC, "NUM_POSITIONS": 2}, update),
    (causal_conv1d._convolve_tokens_kernel, CONV, prefill),
    (causal_conv1d._store_boundaries_kernel, {"NUM_TAPS": 4, "TAPS": 4, "BLOCK_C": 64}, {}),
    (causal_conv1d._convolve_positions_kernel, {**CONV, "NUM_POSITIONS": 2}, decode),
]
for kernel, constants, tiles in KERNELS:
    options = {name: value for name, value in tiles.items() if name.startswith("num_")}
    constants = constants | {name: value for name, value in tiles.items() if name not in options}
    compiled = compile_kernel(kernel, constants, TYPES, **options)
    print("compiled", kernel.__name__, compiled.registers, compiled.stack_bytes)
    if kernel is ssd_chunk_scan._scan_rows_kernel:
        # The addresses of the state, from one end of the row to the other, and some that every chunk reads.
        assert compiled.stack_bytes <= 512
        assert "wgmma.mma_async" in compiled.ptx or DTYPE != "bf16"
        assert "cp.async" in compiled.ptx or DTYPE != "bf16"
    else:
        assert compiled.stack_bytes == 0
    if kernel is selective_state_update._update_tiles_kernel:
        assert "ld.global.v4.b32" in compiled.ptx  # the state, 16 bytes a load
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
    assert output_of(COMPILE, DTYPE=dtype, STATE=state).count("compiled") == 6
