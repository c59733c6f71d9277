"""The cost of caches with fewer bits: right answers of the recall task, errors of states after many tokens.

    python -m benchmarks.caches.number_formats --prompts 20 --json benchmarks/results/cache_dtypes.json

Recall: every cache format runs on `serve`, and on `up` with two drafts per step. Their completions must be
equal, cold and warm (benchmarks/caches/recall.py). The last column counts completions whose text after the
value differs from that with the model's own cache formats: there the model may say something else.

State: decode rows of one Mamba layer with random inputs. The state is kept in each format and compared with
float64, for heads that forget in about ten tokens, in hundreds, and in ten thousand.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.caches.recall import LENGTHS, measure, num_different, questions, values
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.ssm.selective_state_update import selective_state_update
from twinfang.bench.machine import machine

_FP8 = ("--kv-cache-dtype", "fp8")
_BFLOAT16 = ("--mamba-ssm-cache-dtype", "bfloat16")
_BY_CHANCE = (*_BFLOAT16, "--enable-mamba-cache-stochastic-rounding")
FORMATS = {
    "float32 KV, float32 state": (),
    "FP8 KV, float32 state": _FP8,
    "float32 KV, bfloat16 state": _BFLOAT16,
    "float32 KV, bfloat16 state, by chance": _BY_CHANCE,
    "FP8 KV, bfloat16 state, by chance": (*_FP8, *_BY_CHANCE),
}
CHECKPOINTS = (64, 512, 4096, 32768)
MEMORIES = (10, 300, 10_000)
"""Tokens after which a head has forgotten all but 1 / e."""
POOLS = {
    "float32": (torch.float32, NEAREST),
    "bfloat16, to nearest": (torch.bfloat16, NEAREST),
    "bfloat16, by chance": (torch.bfloat16, StateRounding.stochastic(0)),
}


def recall(num_prompts: int) -> dict[str, Any]:
    """Return the share of right answers by format and length, and print it as a table."""
    asked = questions(num_prompts)
    rows: dict[str, Any] = {}
    plain = None
    print(f"{'caches':40}" + "".join(f"{length:>8}" for length in LENGTHS) + "   differ behind")
    for name, flags in FORMATS.items():
        answers = measure(("serve", *flags), asked)
        plain = plain or answers
        apart = measure(("up", "--speculative", "2", *flags), asked)
        if values(apart) != values(answers) or num_different(apart, answers):
            raise SystemExit(f"{name}: two servers with drafts answer otherwise than one without")
        shares = {
            length: sum(p.is_correct(a) for p, a in zip(prompts, answers[length], strict=True)) / len(prompts)
            for length, prompts in asked.items()
        }
        different = num_different(answers, plain)
        rows[name] = {"accuracy": shares, "completions_different": different}
        print(f"{name:40}" + "".join(f"{shares[n]:8.1%}" for n in LENGTHS) + f"{different:16}", flush=True)
    return rows


def drift(head_dim: int = 16, state_size: int = 64) -> dict[str, Any]:
    """Return the relative error of states by format, head and number of tokens, and print it as a table."""
    heads = len(MEMORIES)
    A = -1 / torch.tensor([float(memory) for memory in MEMORIES], dtype=torch.float64)
    pools = {name: torch.zeros(2, heads, head_dim, state_size, dtype=d) for name, (d, _) in POOLS.items()}
    exact = torch.zeros(heads, head_dim, state_size, dtype=torch.float64)
    dt_bias = torch.full((heads,), math.log(math.e - 1))  # softplus(dt_bias) = 1
    zeros, slot = torch.zeros(heads), torch.tensor([1], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    errors: dict[str, Any] = {name: {memory: {} for memory in MEMORIES} for name in POOLS}
    for token in range(1, CHECKPOINTS[-1] + 1):
        # All of one sign, as a state that adds up evidence: what is lost is lost in one direction.
        x = torch.rand(1, 1, heads, head_dim, generator=generator)
        B = torch.rand(1, 1, 1, state_size, generator=generator)
        exact = torch.exp(A)[:, None, None] * exact + x[0, 0, :, :, None].double() * B[0, 0, 0].double()
        operands = x, torch.zeros(1, 1, heads), A.float(), B, B, zeros, dt_bias
        seq_lens = torch.tensor([token], dtype=torch.int32)
        for name, (_, rounding) in POOLS.items():
            where = pools[name], slot, slot[:, None]
            options = {"dt_limit": (0.0, math.inf), "seq_lens": seq_lens, "rounding": rounding}
            selective_state_update(*operands, *where, **options)
        if token in CHECKPOINTS:
            for name, pool in pools.items():
                for memory, found, expected in zip(MEMORIES, pool[1].double(), exact, strict=True):
                    errors[name][memory][token] = float((found - expected).norm() / expected.norm())
    print(f"\n{'state':24}{'memory':>8}" + "".join(f"{token:>12}" for token in CHECKPOINTS))
    for name, by_memory in errors.items():
        for memory, by_token in by_memory.items():
            cells = "".join(f"{by_token[token]:12.1e}" for token in CHECKPOINTS)
            print(f"{name:24}{memory:>8}{cells}")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=20, help="prompts of each length")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    figures = {"machine": machine(), "drift": drift(), "recall": recall(options.prompts)}
    figures["prompts"] = options.prompts
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
