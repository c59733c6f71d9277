"""The bundled model's training data: Python's own sources, and three tasks with exact answers.

| kind | looks like | answers |
|---|---|---|
| text | windows of the standard library's sources | every token |
| recall | `QX=402;ZP=913;…?QX=402;?ZP=913;…` | the value and `;` after each query |
| copying | `QXRTWA|QXRTWA;` | the second half |
| addition | `123+456=579;` | the sum and `;` |
| chat | recall and addition as turns of the chat template | the assistant's words |

Random keys and digits cannot be predicted. So only answers count in the loss (weight 1); all else has weight
0.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import string
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from bundled_tokenizer import BOS, EOS, IM_END, IM_START
from tokenizers import Tokenizer
from torch import Tensor

from testing.oracles.recall_task import MAX_PAIRS, PAIR_TOKENS, distinct_keys, random_value

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "pydoc_data", "encodings"}
)
HELD_OUT_EVERY = 50
"""One of this many files is not used for training; the text loss is measured on these files."""


@dataclass(frozen=True)
class Batch:
    """Token ids [B, T] and the loss weight of each position's next token [B, T]."""

    token_ids: Tensor
    weights: Tensor


def library_sources() -> list[str]:
    """The standard library's sources in the order of their paths, on any machine that runs this Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


class TrainingData:
    """Batches of the mixture; the same seed gives the same batches."""

    def __init__(self, tokenizer: Tokenizer, sources: list[str], seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(f"training data {seed}")
        characters = string.ascii_uppercase + string.digits + "=;?|+"
        self.char_ids = {character: tokenizer.token_to_id(character) for character in characters}
        sample = "QX=402;ZP=913;?QX=402;ABC|ABC;12+9=21;"
        if tokenizer.encode(sample).ids != self._ids(sample):
            raise ValueError("the tasks need a token a character; the tokenizer merges some of them")
        encoded = [[BOS, *ids, EOS] for ids in self._encode_all(sources)]
        held_out = encoded[::HELD_OUT_EVERY]
        training = [ids for index, ids in enumerate(encoded) if index % HELD_OUT_EVERY]
        self.rng.shuffle(training)
        self.text = torch.tensor([token for ids in training for token in ids])
        self.held_out_text = torch.tensor([token for ids in held_out for token in ids])
        self.user = tokenizer.encode("user\n").ids
        self.assistant = tokenizer.encode("assistant\n").ids
        self.newline = tokenizer.encode("\n").ids

    def _encode_all(self, sources: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(sources)]

    def _ids(self, text: str) -> list[int]:
        return [self.char_ids[c] for c in text]

    def batch(self, num_seqs: int, num_tokens: int, mixture: dict[str, float]) -> Batch:
        """Returns `num_seqs` sequences of `num_tokens`; kinds are drawn in the mixture's proportions, evenly
        spread."""
        edges = list(itertools.accumulate(mixture.values()))
        offset = self.rng.random()
        rows, weights = [], []
        for index in range(num_seqs):
            # Equal strides through the cumulative mixture, so that every batch has nearly its proportions.
            drawn = bisect.bisect(edges, (index + offset) / num_seqs * edges[-1], hi=len(edges) - 1)
            kind = list(mixture)[drawn]
            # One token more than requested, because a position's weight is the weight of the token it
            # predicts.
            ids, marks = getattr(self, f"_{kind}")(num_tokens + 1)
            rows.append(torch.as_tensor(ids[:num_tokens]))
            weights.append(torch.as_tensor(marks[1 : num_tokens + 1], dtype=torch.float32))
        return Batch(torch.stack(rows), torch.stack(weights))

    def _text(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        start = self.rng.randrange(len(self.text) - num_tokens)
        return self.text[start : start + num_tokens], torch.ones(num_tokens)

    def _marked(self, parts: list[tuple[str, int]]) -> tuple[list[int], list[int]]:
        """Returns the token ids of the parts in order, and each part's mark for each of its tokens."""
        ids = [token for text, _ in parts for token in self._ids(text)]
        return ids, [mark for text, mark in parts for _ in text]

    def _num_pairs(self, max_pairs: int) -> int:
        """Returns a log-uniform or uniform number in 2 … `max_pairs`, so that short lists and full contexts
        are both frequent."""
        most = min(max_pairs, MAX_PAIRS)
        if self.rng.random() < 0.5:
            return self.rng.randint(2, most)
        return int(math.exp(self.rng.uniform(math.log(2), math.log(most + 1))))

    def _recall(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """Returns pairs, then queries; one time in three, pairs and queries mixed."""
        rng = self.rng
        filler = "".join(rng.choice(string.digits) for _ in range(rng.randrange(PAIR_TOKENS)))
        keys = distinct_keys(rng, self._num_pairs((num_tokens - 3 * PAIR_TOKENS) // PAIR_TOKENS))
        values = {key: random_value(rng) for key in keys}
        first = 1 if rng.random() < 1 / 3 else len(keys)
        share_of_queries = rng.uniform(0.1, 0.7)
        parts, told, length = [(filler, 0)], 0, len(filler)
        while length < num_tokens:
            if told < first or (told < len(keys) and rng.random() > share_of_queries):
                added = [(f"{keys[told]}={values[keys[told]]};", 0)]
                told += 1
            else:
                key = keys[rng.randrange(told)]
                added = [(f"?{key}=", 0), (f"{values[key]};", 1)]
            parts += added
            length += sum(len(text) for text, _ in added)
        ids, marks = self._marked(parts)
        return ids[:num_tokens], marks[:num_tokens]

    def _copying(self, num_tokens: int) -> tuple[list[int], list[int]]:
        parts, length = [], 0
        while length < num_tokens:
            size = int(math.exp(self.rng.uniform(math.log(3), math.log(65))))
            word = "".join(self.rng.choices(string.ascii_uppercase, k=size))
            parts += [(f"{word}|", 0), (f"{word};", 1)]
            length += 2 * size + 2
        ids, marks = self._marked(parts)
        return ids[:num_tokens], marks[:num_tokens]

    def _sum(self) -> tuple[str, str]:
        """Returns question and answer; sometimes with short numbers, as an easy beginning."""
        digits = self.rng.choice((1, 2, 3, 3, 3))
        left, right = (self.rng.randrange(10**digits) for _ in range(2))
        return f"{left}+{right}=", str(left + right)

    def _addition(self, num_tokens: int) -> tuple[list[int], list[int]]:
        parts, length = [], 0
        while length < num_tokens:
            question, answer = self._sum()
            parts += [(question, 0), (f"{answer};", 1)]
            length += len(question) + len(answer) + 1
        ids, marks = self._marked(parts)
        return ids[:num_tokens], marks[:num_tokens]

    def _chat(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """Returns conversations: the first turn of each gives pairs and asks for one, later turns ask for
        others."""
        ids: list[int] = []
        marks: list[int] = []
        while len(ids) < num_tokens:
            room = max(2, (num_tokens - len(ids)) // PAIR_TOKENS)
            keys = distinct_keys(self.rng, self._num_pairs(room))
            values = {key: random_value(self.rng) for key in keys}
            told = "".join(f"{key}={values[key]};" for key in keys)
            for _ in range(self.rng.randint(2, 12)):
                question, answer = self._sum()
                if told or self.rng.random() < 0.8:
                    key = self.rng.choice(keys)
                    question, answer = f"{told}?{key}=", values[key]
                told = ""
                for text_ids, mark in (
                    ([IM_START, *self.user, *self._ids(question), IM_END, *self.newline], 0),
                    ([IM_START, *self.assistant], 0),
                    ([*self._ids(answer), IM_END], 1),
                    (self.newline, 0),
                ):
                    ids += text_ids
                    marks += [mark] * len(text_ids)
        return ids[:num_tokens], marks[:num_tokens]
