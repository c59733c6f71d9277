"""What reading a start from files costs, in tokens that the device computes meanwhile: routers are told."""

from __future__ import annotations

from dataclasses import dataclass

from engine.files.prompt_pace import PromptPace
from engine.files.start_files import StartFiles
from engine.memory.host_tier import HostMemory
from engine.memory.prefix_journal import ReadCost


@dataclass(frozen=True)
class FileReadCost:
    """Estimates by the last reads and by the last prompts of this server."""

    files: StartFiles
    pace: PromptPace
    memory: HostMemory
    block_tokens: int
    to_device: ReadCost
    """From host memory on."""

    def now(self) -> ReadCost:
        """Returns the cost while nothing else is read."""
        start_s = self.files.read_s(self.memory.state_pages)
        block_s = self.files.read_s(1) - self.files.read_s(0) if self.memory.has_kv else 0.0
        return ReadCost(
            self.to_device.start + self.pace.tokens(start_s),
            self.to_device.token + self.pace.tokens(block_s) / self.block_tokens,
        )
