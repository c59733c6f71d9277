"""The Triton kernels of the Mamba ops compile for Hopper without a GPU: the interpreter checks no types."""

import pytest

from tests.kernels.compiled import output_of

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import causal_conv1d, selective_state_update, ssd_chunk_scan

POINTERS = {
    "cu_seqlens_ptr": "*i32", "read_slots_ptr": "*i32", "write_slots_ptr": "*i32",
    "has_initial_ptr": "*u8", "row_starts_ptr": "*i32",
    **{f"boundary_{name}_ptr": "*i32" for name in ("rows", "offsets", "slots")},
    **{name: "*DTYPE" for name in ("x_ptr", "dt_ptr", "B_ptr", "C_ptr", "y_ptr", "weight_ptr", "bias_ptr")},
}
SCAN = {"HEADS_PER_GROUP": 8, "CHUNK": 128, "BLOCK_P": 64, "BLOCK_N": 64, "PRECISION": "tf32x3"}
CONV = {"HAS_BIAS": True, "NUM_TAPS": 4, "TAPS": 4}
KERNELS = [
    (ssd_chunk_scan._cumulate_decay_kernel, {"CHUNK": 128, "BLOCK_H": 16}),
    (ssd_chunk_scan._chunk_states_kernel, {**SCAN, "BLOCK_T": 32}),
    (ssd_chunk_scan._pass_states_kernel, {"HAS_BOUNDARIES": True, "CHUNK": 128, "BLOCK": 1024}),
    (ssd_chunk_scan._chunk_outputs_kernel, {**SCAN, "BLOCK_Q": 16}),
    (
        selective_state_update._update_tiles_kernel,
        {"HEADS_PER_GROUP": 8, "NUM_POSITIONS": 2, "BLOCK_P": 16, "BLOCK_N": 128},
    ),
    (causal_conv1d._convolve_tokens_kernel, {**CONV, "BLOCK_T": 32, "BLOCK_C": 64}),
    (causal_conv1d._store_boundaries_kernel, {"NUM_TAPS": 4, "TAPS": 4, "BLOCK_C": 64}),
    (causal_conv1d._convolve_positions_kernel, {**CONV, "NUM_POSITIONS": 2, "BLOCK_C": 128}),
]
for kernel, constants in KERNELS:
    def kind(name):
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return POINTERS.get(name, "*fp32").replace("DTYPE", DTYPE)
        return "fp32" if name in ("dt_min", "dt_max") else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    constexprs = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print("compiled", kernel.__name__)
"""


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
def test_kernels_compile_for_sm_90(dtype):
    assert output_of(COMPILE, DTYPE=dtype).count("compiled") == 8
