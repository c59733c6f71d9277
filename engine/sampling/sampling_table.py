"""Persistent per-row tables of sampling parameters on the device. A step's sampling reads them.

A row is filled when its request is admitted and cleared when the request leaves; steps gather rows by index.
Row N is the null row, which padding uses. What the host has written reaches the device before the next step
(:func:`engine.memory.row_fields.send`). In shapes, ``S`` is the maximum number of stop ids, ``V`` the size of
the vocabulary, and ``R`` the number of a step's rows.

| table | shape | in a cleared row and the null row |
|---|---|---|
| numbers: the keys of :data:`_NUMBERS` | ``[N+1, numbers]`` float32 | the values of :data:`_NUMBERS` |
| integers: top-k, seed, least length | ``[N+1, 3]`` int64 | 0 |
| stop ids | ``[N+1, S]`` int64 | -1 |
| counts, in prompt, bias: allocated when the first request needs them | ``[N+1, V]`` | 0 |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine.memory.async_copy import upload
from engine.memory.row_fields import RowFields, send
from engine.request import Request
from wire.messages.sampling_params import SamplingParams

_NUMBERS = {
    "temperature": 0.0,  # the first three in this order, for kernels.sampling.sample_tokens
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Numbers of :class:`SamplingParams` that have columns, with their values in a cleared row."""
_NEUTRAL_INTEGERS = (0, 0, 0)
_NO_STOP_ID = -1
_NEUTRAL = {"numbers": tuple(_NUMBERS.values()), "integers": _NEUTRAL_INTEGERS, "stop_ids": _NO_STOP_ID}
"""A cleared row."""


@dataclass(frozen=True)
class SamplingNeeds:
    """The parts of sampling that at least one row of a step needs. The step leaves out the other parts.

    A row's tokens don't depend on parts that only other rows need.
    """

    random: bool = False
    """Some row has a temperature above 0."""
    filtered: bool = False
    """Some random row has a top-k, top-p or min-p."""
    processed: bool = False
    """Some row has a bias, a penalty or forbidden stop tokens."""
    constrained: bool = False
    """Some row has a grammar."""
    budgeted: bool = False
    """Some row has a budget of thinking."""

    def __or__(self, other: SamplingNeeds) -> SamplingNeeds:
        return SamplingNeeds(
            self.random or other.random,
            self.filtered or other.filtered,
            self.processed or other.processed,
            self.constrained or other.constrained,
            self.budgeted or other.budgeted,
        )


_GREEDY = SamplingNeeds()


@dataclass(frozen=True)
class SamplingColumns:
    """The parameters of a step's rows, each ``[R]``; float32 except top-k, seed and least length."""

    temperature: torch.Tensor
    """0 means greedy."""
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    top_k: torch.Tensor
    """0 keeps all tokens."""
    seed: torch.Tensor
    least_length: torch.Tensor
    """No stop token is sampled at an index below this value."""


@dataclass(frozen=True)
class TokenTables:
    """The data of penalties and biases for each token of the vocabulary, ``[N+1, V]`` each."""

    counts: torch.Tensor
    """How often the answer contains the token, int32."""
    in_prompt: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device) -> TokenTables:
        def table(dtype: torch.dtype) -> torch.Tensor:
            # A tensor made in inference mode can't be changed later outside inference mode.
            with torch.inference_mode(False):
                return torch.zeros(num_rows, vocab_size, dtype=dtype, device=device)

        return cls(table(torch.int32), table(torch.bool), table(torch.float32))

    def clear(self, row: int) -> None:
        for table in (self.counts, self.in_prompt, self.bias):
            table[row].zero_()

    def fill(self, request: Request, params: SamplingParams) -> None:
        """Fill a cleared row. A request that was preempted already has tokens of its answer: count them."""
        device, row = self.counts.device, request.row
        tokens = upload(np.array(request.tokens, dtype=np.int64), device)
        prompt, answer = tokens[: request.num_prompt], tokens[request.num_prompt :]
        self.in_prompt[row].index_fill_(0, prompt, True)
        self.counts[row].index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias, strict=True)
            index = upload(np.array(token_ids, dtype=np.int64), device)
            self.bias[row].index_add_(0, index, upload(np.array(biases, dtype=np.float32), device))


class SamplingTable:
    """Sampling parameters of up to ``num_rows`` requests, followed by the null row."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, max_stop_ids: int) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self._device = device
        self.fields = RowFields(
            num_rows + 1,
            {
                "numbers": (torch.float32, len(_NUMBERS)),
                "integers": (torch.int64, len(_NEUTRAL_INTEGERS)),
                "stop_ids": (torch.int64, max_stop_ids),
            },
            device,
        )
        for row in range(num_rows + 1):
            self.fields.write(row, **_NEUTRAL)
        send([self.fields])
        self._needs = [_GREEDY] * (num_rows + 1)
        self._asked: tuple[list[int], SamplingNeeds] = ([], _GREEDY)
        """Rows and result of the last call of :meth:`needs`. In most steps the rows are the same again."""
        self._tokens: TokenTables | None = None

    @property
    def stop_ids(self) -> torch.Tensor:
        """Stop ids ``[N+1, S]`` int64, padded at the end with -1. The tensor's address never changes."""
        return self.fields.device["stop_ids"]

    @property
    def tokens(self) -> TokenTables:
        """Tables of penalties and biases. Their addresses are fixed from the first use on."""
        if self._tokens is None:
            self._tokens = TokenTables.allocate(self.num_rows + 1, self.vocab_size, self._device)
        return self._tokens

    def fill(self, request: Request) -> None:
        """Write an admitted request's parameters and its answer so far into its row."""
        params, row = request.params, request.row
        if params is None:
            self.clear(row)
            return
        self._asked = [], _GREEDY
        self.fields.write(
            row,
            numbers=_numbers_of(params),
            integers=(params.top_k, request.seed, request.num_prompt + params.min_tokens),
            stop_ids=self._padded_stop_ids(request),
        )
        self._clear_tokens(row)
        self._needs[row] = _needs_of(params, bool(request.stop_token_ids))
        if self._needs[row].processed:
            self.tokens.fill(request, params)

    def clear(self, row: int) -> None:
        """Write neutral parameters, so that no trace of the row's request is left."""
        self._asked = [], _GREEDY
        self.fields.write(row, **_NEUTRAL)
        self._clear_tokens(row)
        self._needs[row] = _GREEDY

    def needs(self, requests: Iterable[Request]) -> SamplingNeeds:
        """Return the needs of a step of these requests, whose rows are filled.

        The result is kept for the next call as long as no row changes.
        """
        rows = [request.row for request in requests]
        if rows != self._asked[0]:
            needs = _GREEDY
            for kind in {self._needs[row] for row in rows}:
                needs = needs | kind
            self._asked = rows, needs
        return self._asked[1]

    def gather(self, rows: torch.Tensor) -> SamplingColumns:
        """Return the parameters of ``rows`` ``[R]`` int64."""
        tables = self.fields.device
        numbers = dict(zip(_NUMBERS, tables["numbers"][rows].unbind(dim=1), strict=True))
        top_k, seed, least_length = tables["integers"][rows].unbind(dim=1)
        return SamplingColumns(**numbers, top_k=top_k, seed=seed, least_length=least_length)

    def _clear_tokens(self, row: int) -> None:
        # Rows without penalties are cleared too: a step with one penalised row counts the tokens of all rows.
        if self._tokens is not None:
            self._tokens.clear(row)

    def _padded_stop_ids(self, request: Request) -> list[int]:
        # An id outside the vocabulary is never sampled. As an index it would exceed a row's logits.
        known = sorted(token_id for token_id in request.stop_token_ids if 0 <= token_id < self.vocab_size)
        width = self.stop_ids.shape[1]
        if len(known) > width:
            raise ValueError(
                f"the request has {len(known)} stop token ids within the vocabulary; {width} fit"
            )
        return known + [_NO_STOP_ID] * (width - len(known))


def _numbers_of(params: SamplingParams) -> list[float]:
    numbers = {name: getattr(params, name) for name in _NUMBERS}
    return list((numbers | {"temperature": 0.0} if params.greedy else numbers).values())


def _needs_of(params: SamplingParams, has_stop_ids: bool) -> SamplingNeeds:
    random = not params.greedy
    forbids_stop = params.min_tokens > 0 and has_stop_ids
    return SamplingNeeds(
        random=random,
        filtered=random and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0),
        processed=bool(params.logit_bias) or params.has_penalties or forbids_stop,
        constrained=params.grammar is not None,
        budgeted=params.thinking is not None and params.thinking.budget is not None,
    )
