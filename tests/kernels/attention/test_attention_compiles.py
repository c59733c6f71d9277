"""The Triton kernels of attention, norms and the KV store compile for Hopper without a GPU."""

import pytest

from testing.kernels.compiled import output_of

COMPILE = """
import torch
import triton.language as tl

from kernels.attention import kv_cache, paged_attention_decode, paged_attention_prefill, rotary
from kernels.norms import gated_rms_norm, rms_norm, silu_gate
from testing.kernels.sm_90 import compile_kernel

TYPES = {
    "*": "*" + DTYPE, "scale_log2": "fp32", "eps": "fp32", "scaling": "fp32", "slot_mapping_ptr": "*i64",
    **{name: "*i32" for name in ("block_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr")},
    **{name: "*fp32" for name in ("partial_ptr", "lse_ptr", "inv_freq_ptr")}, "positions_ptr": "*i64",
    **{name: "fp32" for name in ("v_scale", "k_factor", "v_factor")},
}
dtype = torch.bfloat16 if DTYPE == "bf16" else torch.float32
prefill = paged_attention_prefill.tile_request(dtype, 4, 80, 16).default
decode = dict(paged_attention_decode.tile_request(dtype, 4, 80, 16, 4).default)
del decode["PROGRAMS_PER_SM"]
DOT = {"HEAD_DIM": 80, "BLOCK_SIZE": 16, "BLOCK_D": 128, "PRECISION": "tf32" if DTYPE == "bf16" else "ieee"}
NORM = {"ACC": tl.float32}
GATED = {**NORM, "EPS": 1e-5}
SPLIT = {"MIN_SPLIT": 256}
KERNELS = [
    (paged_attention_prefill._prefill_kernel, {**DOT, "HEADS_PER_KV": 4}, prefill),
    (
        paged_attention_decode._decode_kernel,
        {
            **DOT, **SPLIT, "IS_SPLIT": True, "NUM_POSITIONS": 4, "POSITIONS": 4, "NUM_HEADS": 32,
            "HEADS_PER_KV": 4, "BLOCK_M": 16,
        },
        decode,
    ),
    (
        paged_attention_decode._merge_splits_kernel,
        {**SPLIT, "HEAD_DIM": 80, "BLOCK_SPLITS": 32, "BLOCK_D": 128}, {},
    ),
    (kv_cache._store_kv_kernel, {"BLOCK_H": 8, "BLOCK_D": 128}, {}),
    (rms_norm._rms_norm_kernel, {**NORM, "HAS_RESIDUAL": True, "BLOCK": 4096}, {}),
    (gated_rms_norm._gated_norm_kernel, {**GATED, "GATE_FIRST": True, "GROUPS": 1, "BLOCK": 1024}, {}),
    (gated_rms_norm._gated_norm_kernel, {**GATED, "GATE_FIRST": False, "GROUPS": 4, "BLOCK": 128}, {}),
    (silu_gate._silu_gate_kernel, {**NORM, "BLOCK": 1024}, {}),
    (
        rotary._rotary_kernel,
        {
            "HAS_NORM": True, "HEAD_DIM": 256, "HALF": 32, "BLOCK_H": 8, "BLOCK_HALF": 32, "BLOCK_REST": 256,
        }, {},
    ),
]
for kernel, constants, tiles in KERNELS:
    options = {name: value for name, value in tiles.items() if name.startswith("num_")}
    constants = constants | {name: value for name, value in tiles.items() if name not in options}
    compiled = compile_kernel(kernel, constants, TYPES, **options)
    if kernel is rotary._rotary_kernel:
        assert "FF921FB54442D18" in compiled.ptx  # a quarter turn in float64, not rounded to float32
    print("compiled", kernel.__name__, "with" if "wgmma.mma" in compiled.ptx else "without", "wgmma")
    assert compiled.stack_bytes == 0, "registers spilled"
    if kernel is paged_attention_decode._decode_kernel:
        # More than one buffer for K and one for V: they are loaded while products are computed.
        tile_bytes = constants["BLOCK_N"] * 128 * (2 if DTYPE == "bf16" else 4)
        assert compiled.shared_bytes >= 2 * (options["num_stages"] - 1) * tile_bytes
"""


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
def test_kernels_compile_for_sm_90_without_spills(dtype):
    output = output_of(COMPILE, DTYPE=dtype)
    assert output.count("compiled") == 9
    if dtype == "bf16":
        assert "_prefill_kernel with wgmma" in output


COMPILE_WIDE = """
import torch

from kernels.attention import paged_attention_decode, paged_attention_prefill
from testing.kernels.sm_90 import compile_kernel

TYPES = {
    "*": "*" + DTYPE, **{name: "fp32" for name in ("scale_log2", "v_scale", "k_factor", "v_factor")},
    **{name: "*i32" for name in ("block_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr")},
    **{name: "*fp32" for name in ("partial_ptr", "lse_ptr")},
}
dtype = torch.bfloat16 if DTYPE == "bf16" else torch.float32
prefill = paged_attention_prefill.tile_request(dtype, 8, 256, 16).default
decode = dict(paged_attention_decode.tile_request(dtype, 8, 256, 16, 4).default)
del decode["PROGRAMS_PER_SM"]
DOT = {"HEAD_DIM": 256, "BLOCK_SIZE": 16, "BLOCK_D": 256, "HEADS_PER_KV": 8}
DOT["PRECISION"] = "tf32" if DTYPE == "bf16" else "ieee"
POSITIONS = {"NUM_POSITIONS": 4, "POSITIONS": 4}
DECODE = {**POSITIONS, "MIN_SPLIT": 128, "IS_SPLIT": True, "NUM_HEADS": 16, "BLOCK_M": 32}
for kernel, constants, tiles in (
    (paged_attention_prefill._prefill_kernel, DOT, prefill),
    (paged_attention_decode._decode_kernel, {**DOT, **DECODE}, decode),
):
    options = {name: value for name, value in tiles.items() if name.startswith("num_")}
    constants = constants | {name: value for name, value in tiles.items() if name not in options}
    compiled = compile_kernel(kernel, constants, TYPES, **options)
    print("compiled", kernel.__name__, compiled.registers, compiled.shared_bytes)
    assert compiled.stack_bytes == 0, "registers spilled"
    assert compiled.shared_bytes <= 227 * 1024
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_heads_of_256_compile_without_spills(dtype):
    assert output_of(COMPILE_WIDE, DTYPE=dtype).count("compiled") == 2


COMPILE_E4M3 = """
import torch

from kernels.attention import kv_cache, paged_attention_decode, paged_attention_prefill
from testing.kernels.sm_90 import compile_kernel

TYPES = {
    "*": "*bf16", "slot_mapping_ptr": "*i64",
    **{name: "fp32" for name in ("scale_log2", "v_scale", "k_factor", "v_factor")},
    **{name: "*i32" for name in ("block_table_ptr", "cu_seqlens_ptr", "seq_lens_ptr")},
    **{name: "*fp32" for name in ("partial_ptr", "lse_ptr")},
}
prefill = paged_attention_prefill.tile_request(torch.bfloat16, 16, 128, 16).default
decode = dict(paged_attention_decode.tile_request(torch.bfloat16, 16, 128, 16, 4).default)
del decode["PROGRAMS_PER_SM"]
DOT = {"HEAD_DIM": 128, "BLOCK_SIZE": 16, "BLOCK_D": 128, "PRECISION": "tf32", "HEADS_PER_KV": 16}
POSITIONS = {"NUM_POSITIONS": 4, "POSITIONS": 4}
DECODE = {**POSITIONS, "MIN_SPLIT": 256, "IS_SPLIT": True, "NUM_HEADS": 32, "BLOCK_M": 64}
for cache, kernel, constants, tiles in (
    (CACHE, paged_attention_prefill._prefill_kernel, DOT, prefill),
    (CACHE, paged_attention_decode._decode_kernel, {**DOT, **DECODE}, decode),
    ("*u8", kv_cache._store_kv_kernel, {"BLOCK_H": 2, "BLOCK_D": 128}, {}),
):
    types = {**TYPES, "k_cache_ptr": cache, "v_cache_ptr": cache}
    options = {name: value for name, value in tiles.items() if name.startswith("num_")}
    constants = constants | {name: value for name, value in tiles.items() if name not in options}
    compiled = compile_kernel(kernel, constants, types, **options)
    print("compiled", kernel.__name__, compiled.registers, "e4m3x2" in compiled.ptx)
    assert compiled.stack_bytes == 0, "registers spilled"
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("cache", ["*fp8e4nv", "*u8"])
def test_kernels_compile_for_e4m3_caches_with_and_without_instructions_for_them(cache):
    output = output_of(COMPILE_E4M3, CACHE=cache)
    assert output.count("compiled") == 3
    assert output.count("True") == (2 if cache == "*fp8e4nv" else 0)
