"""Drives a model by hand: sequences that own blocks and a slot, and batches of pieces of these sequences.

Written only from the contract of ``engine/models/batch.py``, so that a test of the model tests nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from engine.memory.caches import Caches, CacheSpec
from engine.models.batch import Batch, DecodeRows, PrefillRows
from engine.models.causal_lm import CausalLM

BLOCK_SIZE = 8
BLOCKS_EACH = 12
SLOTS_EACH = 4
PIECES = (1, 1, 2, 3, 7, 16, 33, 64)
"""Numbers of a sequence's tokens that one step may compute."""


class Sequence:
    """Token ids and the place of their cache: sequence ``i`` owns a shuffled run of blocks and some slots."""

    def __init__(self, index: int, token_ids: Items[int]) -> None:
        self.token_ids = list(token_ids)
        self.num_computed = 0
        first = 1 + index * BLOCKS_EACH
        order = torch.randperm(BLOCKS_EACH, generator=torch.Generator().manual_seed(index))
        self.blocks = (first + order).tolist()
        self.slots = [1 + index * SLOTS_EACH + offset for offset in range(SLOTS_EACH)]
        self.slot = self.slots[0]

    def addresses(self, begin: int, end: int) -> list[int]:
        return [self.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(begin, end)]


def random_sequences(vocab_size: int, lengths: Items[int], seed: int = 0) -> list[Sequence]:
    choose = random.Random(seed)
    return [
        Sequence(index, [choose.randrange(vocab_size) for _ in range(length)])
        for index, length in enumerate(lengths)
    ]


def empty_caches(spec: CacheSpec, num_sequences: int) -> Caches:
    """Make pools for the given number of sequences. All memory is NaN, so that reading unwritten memory
    shows."""
    caches = Caches(
        spec,
        num_blocks=1 + num_sequences * BLOCKS_EACH,
        num_slots=1 + num_sequences * SLOTS_EACH,
        block_size=BLOCK_SIZE,
        device="cpu",
    )
    caches.kv.fill_(torch.nan)
    for state in [*caches.layers.conv, *caches.layers.ssm]:
        state.fill_(torch.nan)
    return caches


class Driver:
    """A model with caches for a few sequences."""

    def __init__(self, model: CausalLM, num_sequences: int) -> None:
        self.model = model
        self.caches = empty_caches(model.config.cache_spec(mtp=model.mtp is not None), num_sequences)

    def step(self, pieces: Items[tuple[Sequence, int]], *, num_padding_rows: int = 0) -> list[Tensor]:
        """Runs the next ``n`` tokens of each sequence. Returns their logits ``[n, vocab]``, piece by piece.

        A single token with a prior state becomes a decode row, anything else a prefill row.
        """
        decode = [seq for seq, n in pieces if n == 1 and seq.num_computed > 0]
        prefill = [(seq, n) for seq, n in pieces if not (n == 1 and seq.num_computed > 0)]
        logits = self._run(
            decode_rows(decode, num_padding_rows) if decode or num_padding_rows else None,
            prefill_rows(prefill) if prefill else None,
            [*((seq, 1) for seq in decode), *prefill],
            num_padding_rows,
        )
        for seq, n in pieces:
            seq.num_computed += n
        return [logits[id(seq)] for seq, _ in pieces]

    def run_in_random_pieces(self, sequences: Items[Sequence], choose: random.Random) -> list[Tensor]:
        """Runs all tokens. Pieces of one token become decode rows in the same step as other sequences'
        chunks.

        Sequences join and leave between steps. Returns the logits of :meth:`step` for each sequence.
        """
        collected: dict[int, list[Tensor]] = {id(seq): [] for seq in sequences}
        while unfinished := [seq for seq in sequences if seq.num_computed < len(seq.token_ids)]:
            chosen = choose.sample(unfinished, choose.randint(1, len(unfinished)))
            pieces = [
                (seq, min(choose.choice(PIECES), len(seq.token_ids) - seq.num_computed)) for seq in chosen
            ]
            steps = self.step(pieces, num_padding_rows=choose.choice([0, 0, 2]))
            for seq, rows in zip(chosen, steps, strict=True):
                collected[id(seq)].append(rows)
        return [torch.cat(collected[id(seq)]) for seq in sequences]

    def step_speculative(self, sequences: Items[Sequence], num_positions: int) -> list[Tensor]:
        """Runs ``num_positions`` tokens of each sequence as decode rows; token i's state is written to slot
        i.

        Afterwards the caller sets ``seq.num_computed`` and ``seq.slot`` by the number of accepted tokens.
        """
        rows = DecodeRows(
            num_rows=len(sequences),
            num_positions=num_positions,
            seq_lens=_int32([seq.num_computed + num_positions for seq in sequences]),
            block_table=_int32([seq.blocks for seq in sequences]),
            read_slots=_int32([seq.slot for seq in sequences]),
            write_slots=_int32([seq.slots[:num_positions] for seq in sequences]),
            max_seq_len=max(seq.num_computed for seq in sequences) + num_positions,
        )
        logits = self._run(rows, None, [(seq, num_positions) for seq in sequences], 0)
        return [logits[id(seq)] for seq in sequences]

    def _run(
        self,
        decode: DecodeRows | None,
        prefill: PrefillRows | None,
        pieces: Items[tuple[Sequence, int]],
        num_padding_rows: int,
    ) -> dict[int, Tensor]:
        """Runs one step. Padding rows are placed between decode and prefill rows."""
        ids: list[int] = []
        next_ids: list[int] = []
        positions: list[int] = []
        addresses: list[int] = []
        spans: dict[int, tuple[int, int]] = {}
        num_decode = 0 if decode is None else decode.num_rows - num_padding_rows
        for number, (seq, n) in enumerate([*pieces, (None, 0)]):
            if number == num_decode:
                ids += [0] * num_padding_rows
                next_ids += [0] * num_padding_rows
                positions += [0] * num_padding_rows
                addresses += [0] * num_padding_rows
            if seq is not None:
                begin, end = seq.num_computed, seq.num_computed + n
                spans[id(seq)] = (len(ids), len(ids) + n)
                ids += seq.token_ids[begin:end]
                next_ids += [*seq.token_ids, 0][begin + 1 : end + 1]
                positions += range(begin, end)
                addresses += seq.addresses(begin, end)
        batch = Batch(torch.tensor(ids), torch.tensor(positions), torch.tensor(addresses), decode, prefill)
        with torch.inference_mode():
            results = self.compute(batch, torch.tensor(next_ids))
        return {key: results[begin:end] for key, (begin, end) in spans.items()}

    def compute(self, batch: Batch, next_ids: Tensor) -> Tensor:
        """Return a row of logits for every token of the batch. ``next_ids[n]``: the tokens after them."""
        hidden = self.model.forward(batch, self.caches.layers)
        assert torch.isfinite(hidden).all()
        return self.model.logits(hidden)


def decode_rows(sequences: Items[Sequence], num_padding_rows: int) -> DecodeRows:
    """Return rows of one position each; every step's state replaces the previous one."""
    padding = [0] * num_padding_rows
    return DecodeRows(
        num_rows=len(sequences) + num_padding_rows,
        num_positions=1,
        seq_lens=_int32([seq.num_computed + 1 for seq in sequences] + padding),
        block_table=_int32([seq.blocks for seq in sequences] + [[0] * BLOCKS_EACH] * num_padding_rows),
        read_slots=_int32([seq.slot for seq in sequences] + padding),
        write_slots=_int32([[seq.slot] for seq in sequences] + [[0]] * num_padding_rows),
        max_seq_len=max((seq.num_computed + 1 for seq in sequences), default=0),
    )


def prefill_rows(pieces: Items[tuple[Sequence, int]]) -> PrefillRows:
    lengths = [n for _, n in pieces]
    seq_lens = [seq.num_computed + n for seq, n in pieces]
    return PrefillRows(
        num_rows=len(pieces),
        num_tokens=sum(lengths),
        cu_seqlens=_int32([sum(lengths[:i]) for i in range(len(lengths) + 1)]),
        seq_lens=_int32(seq_lens),
        block_table=_int32([seq.blocks for seq, _ in pieces]),
        read_slots=_int32([seq.slot for seq, _ in pieces]),
        write_slots=_int32([seq.slot for seq, _ in pieces]),
        num_before=_int32([seq.num_computed for seq, _ in pieces]),
        has_initial=torch.tensor([seq.num_computed > 0 for seq, _ in pieces]),
        boundaries=None,
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
    )


def _int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
