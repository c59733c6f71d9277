"""What the handoff benchmark moves: blocks and a state of pools of one model's shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.caches import Caches, CacheSpec
from engine.config import EngineConfig
from engine.models import read_config
from twinfang.flag_table import BUNDLED_MODEL

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


def _spec(*, attn_layers: int, kv_heads: int, mamba_layers: int, mamba_heads: int) -> CacheSpec:
    return CacheSpec(
        attn_layers=attn_layers,
        kv_heads=kv_heads,
        head_dim=64,
        kv_dtype=torch.bfloat16,
        mamba_layers=mamba_layers,
        conv_channels=256,
        conv_width=4,
        mamba_heads=mamba_heads,
        mamba_head_dim=32,
        state_size=64,
        conv_dtype=torch.bfloat16,
        ssm_dtype=torch.float32,
    )


SMALL = _spec(attn_layers=1, kv_heads=2, mamba_layers=3, mamba_heads=4)
LARGE = _spec(attn_layers=6, kv_heads=2, mamba_layers=23, mamba_heads=32)


def prompt_case(spec: CacheSpec, *, block_size: int, prompt_len: int, rounds: int) -> Case:
    """A prompt's blocks in one run, as a pool that is not worn hands them out."""
    num_blocks = -(-prompt_len // block_size)
    return Case(f"{prompt_len:,} tokens", spec, block_size, num_blocks, scattered=False, rounds=rounds)


ONE_BLOCK = Case("one block of 8 KB, state of 100 KB", SMALL, 16, 1, scattered=False, rounds=400)


def default_cases() -> list[Case]:
    """Prompts of the bundled model and of a larger one, in one run and scattered over the pools."""
    bundled = read_config(BUNDLED_MODEL, "auto", "cpu").cache_spec()
    cases = [ONE_BLOCK]
    for name, spec in (("bundled", bundled), ("48 KB blocks, 6 MB state", LARGE)):
        for prompt_len, rounds in ((16, 400), (1024, 400), (4096, 400), (16384, 120)):
            case = prompt_case(spec, block_size=16, prompt_len=prompt_len, rounds=rounds)
            cases.append(replace(case, name=f"{name}: {case.name}"))
            if prompt_len >= 4096:
                cases.append(replace(cases[-1], name=f"{cases[-1].name}, scattered", scattered=True))
    return cases
