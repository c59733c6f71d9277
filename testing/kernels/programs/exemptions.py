"""Kernels whose programs break a rule, and why they stay so. An entry that nothing needs is a fault too."""

from __future__ import annotations

from dataclasses import dataclass


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


EXEMPTIONS: tuple[Exemption, ...] = ()
