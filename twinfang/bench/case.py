"""The cases of the benchmark: blocks and a state, in pools of one model's shape, that are handed over."""

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
        caches.kv.fill_(1)  # the system maps memory only when it is first used
        caches.state.fill_(1)
        return caches

    @property
    def num_early_blocks(self) -> int:
        """Blocks that are read while the last chunk is computed: the full blocks of the earlier chunks."""
        per_chunk = CHUNK_TOKENS // self.block_size
        return (self.num_blocks - 1) // per_chunk * per_chunk

    @property
    def block_ids(self) -> list[int]:
        step = 2 if self.scattered else 1
        return list(range(1, 1 + step * self.num_blocks, step))


def prompt_case(spec: CacheSpec, *, block_size: int, prompt_len: int, rounds: int) -> Case:
    """Makes the case of a prompt whose blocks are contiguous, as a fresh pool allocates them."""
    num_blocks = -(-prompt_len // block_size)
    return Case(f"{prompt_len:,} tokens", spec, block_size, num_blocks, scattered=False, rounds=rounds)
