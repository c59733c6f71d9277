"""Outputs that wait to be sent, gathered in the form of the message that sends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from wire.messages.generation import RequestOutput, StepOutputs

MAX_NUMBERS = 4096
"""Maximum number of log-probabilities in one message. Reading so many takes one or two milliseconds, during
which the reader does nothing else. So a step of many requests that report twenty alternatives is sent as
several messages."""


class Outbox:
    """Waiting outputs. Each request's outputs keep their order; consecutive plain outputs become one output.

    Plain outputs have only tokens. Nearly all outputs are plain, so to save time only their tokens are kept,
    without an object for each output.
    """

    def __init__(self, outputs: Iterable[RequestOutput] = ()) -> None:
        self._token_ids: dict[str, tuple[int, ...]] = {}
        self._outputs: list[RequestOutput] = []
        self._others_of: Counter[str] = Counter()
        """How many of ``_outputs`` each request has. The request's further outputs must come after them."""
        self.add_all(outputs)

    def __bool__(self) -> bool:
        return bool(self._token_ids or self._outputs)

    def add_tokens(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Adds an output that has only tokens."""
        if request_id in self._others_of:
            self._append(RequestOutput(request_id, token_ids))
        elif request_id in self._token_ids:
            self._token_ids[request_id] += token_ids
        else:
            self._token_ids[request_id] = token_ids

    def add_all_tokens(self, token_ids: Mapping[str, tuple[int, ...]]) -> None:
        """Calls :meth:`add_tokens` for each request."""
        if not self:
            self._token_ids = dict(token_ids)
            return
        for request_id, tokens in token_ids.items():
            self.add_tokens(request_id, tokens)

    def add(self, output: RequestOutput) -> None:
        if output.is_plain:
            self.add_tokens(output.request_id, output.token_ids)
        else:
            self._append(output)

    def add_all(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.add(output)

    def take(self) -> StepOutputs:
        """Removes and returns all waiting outputs."""
        taken = StepOutputs(self._token_ids, tuple(self._outputs))
        self._token_ids, self._outputs = {}, []
        self._others_of.clear()
        return taken

    def take_message(self) -> StepOutputs:
        """Removes and returns the outputs that have waited longest.

        They have at most :data:`MAX_NUMBERS` log-probabilities, unless a single output has more.
        """
        num_numbers = num_outputs = 0
        for output in self._outputs:
            num_numbers += output.num_logprobs
            if num_numbers > MAX_NUMBERS and num_outputs:
                break
            num_outputs += 1
        else:
            return self.take()
        outputs = tuple(self._outputs[:num_outputs])
        del self._outputs[:num_outputs]
        self._others_of -= Counter(output.request_id for output in outputs)
        taken, self._token_ids = StepOutputs(self._token_ids, outputs), {}
        return taken

    def _append(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._others_of[output.request_id] += 1
