"""The Triton kernels of speculation compile for Hopper without a GPU."""

import pytest

from testing.kernels.compiled import output_of

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.sampling import token_mask
from kernels.speculation import accept_drafts, ngram_draft, prepare_rows

TOKENS = ("tokens", "forced", "sampled", "stop_ids", "results", "input_ids")
POINTERS = {
    **{name + "_ptr": "*i64" for name in (*TOKENS, "rows", "positions", "slot_mapping")},
    "is_finite_ptr": "*u8",
    **{name + "_ptr": "*fp32" for name in ("logits", "masked")},
}
KERNELS = [
    (prepare_rows._prepare_rows_kernel, {"BLOCK_T": 4}),
    (accept_drafts._accept_drafts_kernel, {"BLOCK_T": 4, "BLOCK_S": 2}),
    (ngram_draft._ngram_draft_kernel, {"MIN_N": 2, "MAX_N": 4, "BLOCK_T": 4, "BLOCK": 2048}),
    (token_mask._mask_tokens_kernel, {"BLOCK": 1024}),
]
for kernel, constants in KERNELS:
    constants |= {name: 1 for name in SIZES if name in kernel.arg_names}

    def kind(name):
        if name in constants:
            return "constexpr"
        return POINTERS.get(name, "*i32") if name.endswith("_ptr") else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print("compiled", kernel.__name__, "barriers", ptx.count("bar.sync"))
    assert ".local" not in ptx, "registers spilled"
"""


@pytest.mark.parametrize(
    "sizes_of_one",  # which Triton makes constants
    [
        pytest.param((), id="none"),
        pytest.param(("num_positions", "num_columns", "num_stop_ids", "block_size"), id="all"),
        pytest.param(("num_stop_ids", "num_columns"), id="some", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_compile_for_sm_90_without_spills(sizes_of_one):
    assert output_of(COMPILE, SIZES=sizes_of_one).count("compiled") == 4
