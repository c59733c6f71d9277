"""Measures the bundled model: recall by prompt length, other tasks, held-out text, accepted drafts."""

from __future__ import annotations

import random
import string

import torch
import torch.nn.functional as F
from nemotron_h_training import NemotronHForTraining
from tokenizers import Tokenizer
from torch import Tensor

from testing.oracles.recall_task import chat_recall_prompts, recall_prompts

FIRST_EVALUATION_SEED = 1_000_000
BATCH_TOKENS = 32_768


@torch.no_grad()
def exact_match(model: NemotronHForTraining, tokenizer: Tokenizer, questions: list[tuple[str, str]]) -> float:
    """Returns the share of (prompt, answer) pairs in which greedy decoding gets every token right.

    One forward pass over prompt and answer: greedy decoding gives the answer if and only if each of its
    tokens is the most likely one after those before it.
    """
    encoded = [(tokenizer.encode(p).ids, tokenizer.encode(a).ids) for p, a in questions]
    longest = max(len(prompt) + len(answer) for prompt, answer in encoded)
    device = next(model.parameters()).device
    correct, per_batch = 0, max(1, BATCH_TOKENS // longest)
    for start in range(0, len(encoded), per_batch):
        rows = encoded[start : start + per_batch]
        padded = [prompt + answer + [0] * (longest - len(prompt) - len(answer)) for prompt, answer in rows]
        best = model.logits(torch.tensor(padded, device=device)).argmax(-1).tolist()
        for (prompt, answer), row in zip(rows, best, strict=True):
            correct += row[len(prompt) - 1 : len(prompt) - 1 + len(answer)] == answer
    return correct / len(encoded)


def recall_accuracy(
    model: NemotronHForTraining, tokenizer: Tokenizer, length_tokens: int, num_prompts: int
) -> float:
    """Returns the share of plain recall prompts of one length that are answered exactly."""
    prompts = recall_prompts(FIRST_EVALUATION_SEED, num_prompts, length_tokens)
    return exact_match(model, tokenizer, [(p.prompt, p.answer) for p in prompts])


def chat_recall_accuracy(
    model: NemotronHForTraining, tokenizer: Tokenizer, length_tokens: int, num_prompts: int
) -> float:
    """Like :func:`recall_accuracy`, for prompts in the chat template. The answer includes the turn's end."""
    prompts = chat_recall_prompts(FIRST_EVALUATION_SEED, num_prompts, length_tokens)
    return exact_match(model, tokenizer, [(p.prompt, f"{p.answer}<|im_end|>") for p in prompts])


def addition_accuracy(model: NemotronHForTraining, tokenizer: Tokenizer, num_prompts: int) -> float:
    """Returns the share of right sums of two three-digit numbers. Each prompt begins with one solved sum."""
    rng = random.Random("addition evaluation")
    questions = []
    for _ in range(num_prompts):
        first, second, left, right = (rng.randrange(100, 1000) for _ in range(4))
        questions.append((f"{first}+{second}={first + second};{left}+{right}=", f"{left + right};"))
    return exact_match(model, tokenizer, questions)


def copying_accuracy(model: NemotronHForTraining, tokenizer: Tokenizer, size: int, num_prompts: int) -> float:
    """Returns the share of prompts in which the model repeats `size` random capitals exactly."""
    rng = random.Random("copying evaluation")
    words = ["".join(rng.choices(string.ascii_uppercase, k=size)) for _ in range(num_prompts)]
    return exact_match(model, tokenizer, [(f"{word}|", f"{word};") for word in words])


@torch.no_grad()
def text_loss(model: NemotronHForTraining, text: Tensor, window: int = 512, num_windows: int = 64) -> float:
    """Returns the loss on held-out sources, in nats per token."""
    ids = text[: window * num_windows].view(-1, window).to(next(model.parameters()).device)
    return F.cross_entropy(model.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


@torch.no_grad()
def draft_agreement(model: NemotronHForTraining, token_ids: Tensor, counted: Tensor) -> float:
    """Returns the share of tokens marked by `counted` for which the MTP layer's first draft is the target's
    own greedy token.

    token_ids and counted have the shape [B, T], B sequences of T tokens. If token_ids is greedy output of the
    model, the result is the share of first drafts that speculation accepts.
    """
    hidden = model.hidden(token_ids)
    target = model.lm_head(hidden[:, 1:-1]).argmax(-1)  # greedy token i + 2, from hidden i + 1
    draft = model.mtp_logits(token_ids, hidden)[:, :-1].argmax(-1)  # the same token, from hidden i
    return (target == draft)[counted[:, 2:].bool()].float().mean().item()


@torch.no_grad()
def complete(model: NemotronHForTraining, tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """Returns the greedy continuation, computed in the slow and obvious way."""
    ids = tokenizer.encode(prompt).ids
    start, device = len(ids), next(model.parameters()).device
    for _ in range(num_tokens):
        ids.append(int(model.logits(torch.tensor([ids], device=device))[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=False)
