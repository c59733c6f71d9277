"""Three kinds of prompts for the speculation benchmark: text, recall and text that repeats itself."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from testing.oracles.recall_task import make_recall_prompt
from testing.repository import ROOT

FIRST_SEED = 2_000_000
PROMPT_TOKENS = 192
REPEATED_TOKENS = 24
"""Tokens of the passage that a repetitive prompt consists of."""


def example(name: str) -> Any:
    """Imports a module of examples/: scripts that import one another by their bare names."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def held_out_windows(tokenizer: Tokenizer, num_windows: int, num_tokens: int) -> list[list[int]]:
    """Returns parts of the library sources that the bundled model was not trained on, evenly spread."""
    data = example("training_data")
    sources = data.library_sources()[:: data.HELD_OUT_EVERY]
    text = [token for encoding in tokenizer.encode_batch(sources) for token in encoding.ids]
    stride = (len(text) - num_tokens) // num_windows
    return [text[i * stride : i * stride + num_tokens] for i in range(num_windows)]


def make_prompts(model_dir: Path, num_prompts: int) -> dict[str, list[list[int]]]:
    """Returns token ids, ``PROMPT_TOKENS`` per prompt."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    windows = held_out_windows(tokenizer, num_prompts, PROMPT_TOKENS)
    questions = [make_recall_prompt(FIRST_SEED + i, PROMPT_TOKENS).prompt for i in range(num_prompts)]
    repeats = PROMPT_TOKENS // REPEATED_TOKENS
    return {
        "text": windows,
        "recall": [encoding.ids for encoding in tokenizer.encode_batch(questions)],
        "repetitive": [window[:REPEATED_TOKENS] * repeats for window in windows],
    }
