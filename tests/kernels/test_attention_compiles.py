"""The Triton kernels of attention, norms and the KV store compile for Hopper without a GPU."""

import pytest

from tests.kernels.compiled import output_of

COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import gated_rms_norm, kv_cache, paged_attention_decode, paged_attention_prefill, rms_norm

POINTERS = {
    **{name: "*i32" for name in ("block_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr")},
    **{name: "*fp32" for name in ("partial_ptr", "lse_ptr")},
    "slot_mapping_ptr": "*i64",
}
SMALL = DTYPE == "fp32"
DOT = {
    "HEAD_DIM": 80, "BLOCK_SIZE": 16, "BLOCK_N": 32 if SMALL else 64, "BLOCK_D": 128,
    "PRECISION": "ieee" if SMALL else "tf32",
}
SPLIT = {"NUM_SPLITS": 8, "MIN_SPLIT": 256}
KERNELS = [
    (paged_attention_prefill._prefill_kernel, {**DOT, "HEADS_PER_KV": 4, "BLOCK_M": 32 if SMALL else 128}),
    (
        paged_attention_decode._decode_kernel,
        {**DOT, **SPLIT, "POSITIONS": 4, "NUM_HEADS": 32, "HEADS_PER_KV": 16, "BLOCK_M": 64},
    ),
    (
        paged_attention_decode._merge_splits_kernel,
        {**SPLIT, "HEAD_DIM": 80, "BLOCK_SPLITS": 8, "BLOCK_D": 128},
    ),
    (kv_cache._store_kv_kernel, {"BLOCK_H": 8, "BLOCK_D": 128}),
    (rms_norm._rms_norm_kernel, {"HAS_RESIDUAL": True, "ACC": tl.float32, "BLOCK": 4096}),
    (gated_rms_norm._gated_group_rms_norm_kernel, {"ACC": tl.float32, "BLOCK": 1024}),
]
for kernel, constants in KERNELS:
    def kind(name):
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return POINTERS.get(name, "*" + DTYPE)
        return "fp32" if name in ("scale_log2", "eps") else "i32"

    names = kernel.arg_names
    strided = [i for i, name in enumerate(names) if name.endswith(("_ptr", "_stride"))]
    aligned = {(i,): [["tt.divisibility", 16]] for i in strided}
    signature = {name: kind(name) for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print("compiled", kernel.__name__, "with" if "wgmma.mma" in ptx else "without", "wgmma")
    assert ".local" not in ptx, "registers spilled"
"""


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
def test_kernels_compile_for_sm_90_without_spills(dtype):
    output = output_of(COMPILE, DTYPE=dtype)
    assert output.count("compiled") == 6
    if dtype == "bf16":
        assert "_prefill_kernel with wgmma" in output
        assert "_decode_kernel with wgmma" in output
