"""The Triton kernels of products compile for Hopper without a GPU, for few rows and many alike."""

import pytest

from testing.kernels.compiled import output_of

COMPILE = """
import itertools
import re
import torch

from kernels.linear import invariant_linear
from kernels.moe import expert_linear, few_token_experts
from testing.kernels.sm_90 import compile_kernel

TYPES = {"parts_ptr": "*fp32", "ends_ptr": "*i32", "ids_ptr": "*i64"}

def compiled(kernel, dtype, constants, tiles):
    options = {name: value for name, value in tiles.items() if name.startswith("num_")}
    constants = constants | {name: value for name, value in tiles.items() if name not in options}
    found = compile_kernel(kernel, constants, {**TYPES, "*": "*" + dtype}, **options)
    print("compiled", kernel.__name__, dtype, found.registers, found.shared_bytes)
    assert found.stack_bytes == 0, "registers spilled"
    assert found.shared_bytes <= 113 * 1024, "no room for two programs"
    return found

dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
precision = {"PRECISION": invariant_linear.dot_precision(dtype)}
tiles = dict(invariant_linear.tile_request(dtype, 4096, 8192).default)
del tiles["PARTS"]
products = set()
for is_part in (True, False):
    constants = {"HAS_BIAS": True, "IS_PART": is_part, **precision}
    kernel = compiled(invariant_linear._invariant_linear_kernel, name, constants, tiles)
    assert "cp.async" in kernel.ptx
    # Both forms multiply by the same instructions, in the same number.
    products.add(tuple(re.findall(r"(?:wgmma.mma_async|mma).sync.aligned.\\S+", kernel.ptx)))
assert len(products) == 1, products
assert name != "bf16" or all("wgmma" in one for one in products.pop())
compiled(invariant_linear._add_parts_kernel, name, {"HAS_BIAS": True, "BLOCK": 512}, {})
tiles = expert_linear.tile_request(dtype, 1856, 2688).default
compiled(expert_linear._expert_linear_kernel, name, {"BLOCK_E": 128, **precision}, tiles)
for rows, is_up in itertools.product(few_token_experts.TILE_ROWS, (True, False)):
    tiles = few_token_experts.tile_request(dtype, 1856, 2688, rows).default
    constants = {"K": 8, "BLOCK_J": 8, "BLOCK_M": rows, "OF_PAIRS": not is_up}
    for gated in (True, False) if is_up else (False,):
        kind = {"RELU_SQUARED": is_up and not gated, "GATED": gated}
        compiled(few_token_experts._few_tokens_kernel, name, {**constants, **kind, **precision}, tiles)
"""


@pytest.mark.parametrize("name", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
def test_kernels_compile_for_sm_90_without_spills_and_with_the_same_products_for_few_and_many_rows(name):
    assert output_of(COMPILE, name=name).count("compiled") == 16
