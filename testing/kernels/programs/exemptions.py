"""Kernels whose programs break a rule, and why they stay so. An entry that nothing needs is a fault too."""

from __future__ import annotations

from dataclasses import dataclass

EVERY_TRITON = ("3.6", "3.9")


@dataclass(frozen=True)
class Exemption:
    """One kernel that may break one rule, by at most ``at_most``, on some architectures and Tritons."""

    kernel: str
    rule: str
    at_most: int
    architectures: tuple[int, ...]
    tritons: tuple[str, ...]
    """Major and minor versions."""
    reason: str


_ADDRESSES = "addresses of the state, written before a row's first chunk and read after its last one"
_READ_ONLY = (
    "constant addresses, 19 of 1,400 instructions of a chunk on sm_90; BLOCK_P = 32 needs none, but two"
)
_READ_ONLY += " programs compute each score then: benchmarks.gpu.tune_tiles tries both"
_OTHER_TILES = "the default tiles are made for sm_90; this architecture wants its own table of tiles"
_VECTORS = "tiles are copied by 16 bytes; these are vectors of one float a token, which start at any token"

EXEMPTIONS: tuple[Exemption, ...] = (
    Exemption("ssd_chunk_scan._scan_rows_kernel", "spills", 256, (90,), EVERY_TRITON, _ADDRESSES),
    Exemption("ssd_chunk_scan._scan_rows_kernel", "spills", 376, (100,), EVERY_TRITON, _ADDRESSES),
    Exemption("ssd_chunk_scan._scan_rows_kernel", "spills", 720, (80,), EVERY_TRITON, _OTHER_TILES),
    Exemption("ssd_chunk_scan._scan_rows_kernel", "spills in a loop", 33, (90, 100), ("3.9",), _READ_ONLY),
    Exemption("ssd_chunk_scan._scan_rows_kernel", "spills in a loop", 227, (80,), EVERY_TRITON, _OTHER_TILES),
    Exemption(
        "ssd_chunk_scan._scan_rows_kernel", "narrow copies", 157, (80, 90, 100), EVERY_TRITON, _VECTORS
    ),
    Exemption("gated_delta_chunk._scan_rows_kernel", "spills", 128, (90, 100), EVERY_TRITON, _ADDRESSES),
    Exemption("gated_delta_chunk._scan_rows_kernel", "spills", 392, (80,), EVERY_TRITON, _OTHER_TILES),
    Exemption(
        "gated_delta_chunk._scan_rows_kernel", "spills in a loop", 112, (80,), EVERY_TRITON, _OTHER_TILES
    ),
    Exemption(
        "gated_delta_chunk._scan_rows_kernel", "narrow copies", 146, (80, 90, 100), EVERY_TRITON, _VECTORS
    ),
    Exemption("paged_attention_prefill._prefill_kernel", "spills", 32, (80,), EVERY_TRITON, _OTHER_TILES),
    Exemption("quantized_experts._quantized_experts_kernel", "spills", 24, (80,), EVERY_TRITON, _OTHER_TILES),
    Exemption("quantized_linear._quantized_linear_kernel", "spills", 344, (100,), EVERY_TRITON, _OTHER_TILES),
    Exemption(
        "quantized_linear._quantized_linear_kernel",
        "spills in a loop",
        43,
        (100,),
        EVERY_TRITON,
        _OTHER_TILES,
    ),
)
