"""How long computing a part of a prompt takes, estimated."""

from __future__ import annotations

from engine.memory.start_sizes import StartSizes
from telemetry.engine_metrics import FileCacheFigures

CPU_FLOPS, GPU_FLOPS = 50e9, 500e12
"""FLOP/s of a device that has computed no prompt yet. Only their order of magnitude matters."""


class PromptPace:
    """Estimates by the steps that this server has computed, and by the model's FLOP until there are some."""

    def __init__(self, sizes: StartSizes, figures: FileCacheFigures, device_type: str) -> None:
        self._sizes = sizes
        self._figures = figures
        self._flops_per_s = CPU_FLOPS if device_type == "cpu" else GPU_FLOPS

    def seconds(self, start: int, end: int) -> float:
        """Returns the seconds for the blocks from ``start`` to ``end`` of a prompt."""
        token_s = self._figures.prompt_token_s
        if token_s:
            return token_s * (end - start) * self._sizes.block_tokens
        return self._sizes.flops(start, end) / self._flops_per_s

    def tokens(self, seconds: float) -> float:
        """Returns the number of tokens at a prompt's beginning that are computed in this time."""
        return seconds / self.seconds(0, 1) * self._sizes.block_tokens
