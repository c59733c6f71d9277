"""Measures the bundled model with its bfloat16 weights, as it is served, and prints the model card's values.

python examples/measure_bundled_model.py --prompts 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bundled_tokenizer import train_tokenizer
from model_evaluation import (
    addition_accuracy,
    chat_recall_accuracy,
    complete,
    copying_accuracy,
    draft_agreement,
    recall_accuracy,
    text_loss,
)
from nemotron_h_training import NemotronHForTraining, TrainingConfig
from published_checkpoint import load_checkpoint
from tokenizers import Tokenizer
from train_bundled_model import ROOT, VOCAB_SIZE
from training_data import TrainingData, library_sources

RECALL_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
COPY_SIZES = (8, 32, 64)
CODE_PROMPTS = (
    "import os\nimport sys\n\ndef main(",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "    def close(self):\n        if self._closed:\n",
)


def measured_draft_agreement(model: NemotronHForTraining, tokenizer: Tokenizer, prompt: str) -> float:
    """Returns the share of right first drafts over 96 tokens that the model itself decodes greedily."""
    prompt_ids = tokenizer.encode(prompt).ids
    ids = list(prompt_ids)
    with torch.no_grad():
        while len(ids) < len(prompt_ids) + 96:
            ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    counted = torch.tensor([[False] * len(prompt_ids) + [True] * 96])
    return draft_agreement(model, torch.tensor([ids]), counted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "twinfang" / "bundled_model")
    parser.add_argument("--prompts", type=int, default=200, help="fresh samples a row")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=RECALL_LENGTHS, help="recall prompt lengths"
    )
    arguments = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    model = load_checkpoint(arguments.model, TrainingConfig(vocab_size=VOCAB_SIZE))
    for length in arguments.lengths:
        accuracy = recall_accuracy(model, tokenizer, length, arguments.prompts)
        chat_accuracy = chat_recall_accuracy(model, tokenizer, length, arguments.prompts)
        print(f"recall, {length} tokens: plain {accuracy:.1%}, chat {chat_accuracy:.1%}", flush=True)
    print(f"addition, three digits: {addition_accuracy(model, tokenizer, arguments.prompts):.1%}")
    for size in COPY_SIZES:
        print(f"copying {size} letters: {copying_accuracy(model, tokenizer, size, arguments.prompts):.1%}")

    sources = library_sources()
    if train_tokenizer(sources, VOCAB_SIZE).to_str() != tokenizer.to_str():
        print("this Python's library is not the one that the model was trained on: text figures differ")
    held_out = TrainingData(tokenizer, sources, seed=0).held_out_text
    print(f"held-out text: {text_loss(model, held_out, num_windows=200):.3f} nats a token")
    windows = held_out[: 512 * 64].view(-1, 512)
    agreement = draft_agreement(model, windows, torch.ones_like(windows))
    print(f"MTP first draft = greedy token, held-out text: {agreement:.1%}")
    for prompt in CODE_PROMPTS:
        agreement = measured_draft_agreement(model, tokenizer, prompt)
        print(f"MTP first draft = greedy token, own text: {agreement:.1%}")
        print(prompt + complete(model, tokenizer, prompt, 96), "\n", sep="")


if __name__ == "__main__":
    main()
