"""Drives one layer by hand, for tests that compare it with transformers' own."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.memory.caches import CacheSpec
from engine.models.batch import Batch
from engine.models.block import Mixer
from kernels.cpu.graph import CpuGraph
from testing.engines.sequences import Driver, Sequence, decode_rows, empty_caches

HIDDEN, VOCABULARY = 48, 64


class LayerDriver(Driver):
    """One layer, whose inputs are rows of a table by token id."""

    def __init__(self, mixer: Mixer, spec: CacheSpec, num_sequences: int) -> None:
        self.mixer = mixer
        self.table = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.caches = empty_caches(spec, num_sequences)
        self.batches: list[Batch] = []
        """The batches of all steps so far."""

    def compute(self, batch: Batch, next_ids: Tensor) -> Tensor:
        self.batches.append(batch)
        return self.mixer.forward(self.table[batch.input_ids], batch, self.caches.layers)

    @torch.inference_mode()
    def record(self, batch: Batch) -> tuple[CpuGraph, Tensor, Tensor]:
        """Record the layer's step over a batch; return its graph, inputs and outputs."""
        x, graph = self.table[batch.input_ids], CpuGraph()
        with graph.record():
            y = self.mixer.forward(x, batch, self.caches.layers)
        return graph, x, y


def layer_sequences(*lengths: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(2)
    return [
        Sequence(i, torch.randint(VOCABULARY, (length,), generator=generator).tolist())
        for i, length in enumerate(lengths)
    ]


def chunks_and_decoded_tokens(driver: LayerDriver) -> list[tuple[Sequence, Tensor]]:
    """Run three sequences, in steps that mix chunks of one with decode rows of others. Return the outputs for
    all their tokens."""
    a, b, c = sequences = layer_sequences(40, 1, 70)
    outputs: dict[int, list[Tensor]] = {id(sequence): [] for sequence in sequences}
    for pieces in ([(a, 39), (c, 33)], [(a, 1), (b, 1), (c, 36)], [(c, 1)]):
        for (sequence, _), rows in zip(pieces, driver.step(pieces, num_padding_rows=1), strict=True):
            outputs[id(sequence)].append(rows)
    return [(sequence, torch.cat(outputs[id(sequence)])) for sequence in sequences]


class MtpDriver(Driver):
    """Runs target and MTP layer. A step returns the MTP layer's outputs ``[n, hidden]`` for each piece."""

    def compute(self, batch: Batch, next_ids: Tensor) -> Tensor:
        hidden = self.model.forward(batch, self.caches.layers)
        outputs = self.model.mtp.forward(hidden, next_ids, batch, self.caches.layers)
        assert torch.isfinite(outputs).all()
        return outputs

    @torch.inference_mode()
    def loop(self, sequences: list[Sequence], outputs: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
        """Run the MTP loop from the newest output of each of R sequences, ``[R, hidden]``. Return drafts
        ``[R, k]`` and their outputs ``[R, k, hidden]``.
        """
        drafts = [self.model.logits(outputs).argmax(-1)]
        collected = [outputs]
        for _ in range(num_drafts - 1):
            at = [seq.num_computed for seq in sequences]
            addresses = [seq.addresses(seq.num_computed, seq.num_computed + 1)[0] for seq in sequences]
            batch = Batch(
                torch.zeros(len(at), dtype=torch.int64),
                torch.tensor(at),
                torch.tensor(addresses),
                decode_rows(sequences, 0),
                None,
            )
            collected.append(self.model.mtp.forward(collected[-1], drafts[-1], batch, self.caches.layers))
            drafts.append(self.model.logits(collected[-1]).argmax(-1))
            for seq in sequences:
                seq.num_computed += 1
        for seq in sequences:
            seq.num_computed -= num_drafts - 1
        return torch.stack(drafts, 1), torch.stack(collected, 1)
