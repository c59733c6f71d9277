"""What is handed over: blocks and a state of pools of one model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.memory.caches import Caches, CacheSpec

CHUNK_TOKENS = EngineConfig.max_batch_tokens


@dataclass(frozen=True)
class Case:
    """Pools of one model's shape, and how many blocks of them move with the state."""

    name: str
    spec: CacheSpec
    block_size: int
    num_blocks: int
    scattered: bool
    rounds: int

    def caches(self) -> Caches:
        caches = Caches(
            self.spec,
            num_blocks=2 * self.num_blocks + 2,
            num_slots=3,
            block_size=self.block_size,
            device="cpu",
        )
        caches.kv.fill_(1)  # memory that was never touched is not there yet
        caches.state.fill_(1)
        return caches

    @property
    def num_early_blocks(self) -> int:
        """What is read while the last chunk is computed: the full blocks of those before it."""
        per_chunk = CHUNK_TOKENS // self.block_size
        return (self.num_blocks - 1) // per_chunk * per_chunk

    @property
    def block_ids(self) -> list[int]:
        step = 2 if self.scattered else 1
        return list(range(1, 1 + step * self.num_blocks, step))


def prompt_case(spec: CacheSpec, *, block_size: int, prompt_len: int, rounds: int) -> Case:
    """A prompt's blocks in one run, as a pool that is not worn hands them out."""
    num_blocks = -(-prompt_len // block_size)
    return Case(f"{prompt_len:,} tokens", spec, block_size, num_blocks, scattered=False, rounds=rounds)
