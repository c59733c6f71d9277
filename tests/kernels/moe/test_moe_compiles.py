"""The Triton kernels of the feed-forward layers compile for Hopper without a GPU."""

from testing.kernels.compiled import output_of

COMPILE = """
from kernels.moe import moe_combine, moe_route, moe_sort, router_logits
from kernels.norms import relu_squared, sigmoid_gate
from testing.kernels.sm_90 import compile_kernel

ROUTE = {
    "GROUPS": 8, "GROUP_SIZE": 16, "GROUPS_PER_TOKEN": 4, "EXPERTS_PER_TOKEN": 6, "SHARED_EXPERTS": 2,
    "NORMALIZE": True, "SOFTMAX": False, "BLOCK_G": 8, "BLOCK_E": 16, "BLOCK_K": 8,
}
ONE_GROUP = {"GROUPS": 1, "GROUP_SIZE": 512, "GROUPS_PER_TOKEN": 1, "BLOCK_G": 1, "BLOCK_E": 512}
TYPES = {
    "*": "*bf16", "scaling": "fp32", "ends_ptr": "*i32",
    **{f"{name}_ptr": "*fp32" for name in ("logits", "correction", "weights")},
    **{f"{name}_ptr": "*i64" for name in ("ids", "tokens", "places")},
}
KERNELS = [
    (moe_route._route_kernel, ROUTE, 1),
    (moe_route._route_kernel, {**ROUTE, **ONE_GROUP, "SOFTMAX": True}, 4),
    (moe_sort._sort_kernel, {"BLOCK": 1024}, 4),
    (moe_combine._combine_kernel, {"K": 6, "HAS_PLACES": True, "BLOCK": 1024}, 4),
    (moe_combine._combine_kernel, {"K": 8, "HAS_PLACES": False, "BLOCK": 1024}, 4),
    (router_logits._logits_kernel, {"BLOCK_K": 4096}, 4),
    (relu_squared._relu_squared_kernel, {"BLOCK": 2048}, 4),
    (sigmoid_gate._sigmoid_gate_kernel, {"BLOCK": 1024}, 4),
    (sigmoid_gate._add_sigmoid_gated_kernel, {"BLOCK": 1024}, 4),
]
for kernel, constants, num_warps in KERNELS:
    compiled = compile_kernel(kernel, constants, TYPES, num_warps=num_warps)
    print("compiled", kernel.__name__, compiled.registers)
    assert compiled.stack_bytes == 0, "registers spilled"
    assert kernel is not relu_squared._relu_squared_kernel or "ld.global.v4.b32" in compiled.ptx
"""


def test_kernels_compile_for_sm_90_without_spills():
    assert output_of(COMPILE).count("compiled") == 9
