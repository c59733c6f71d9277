"""Outputs that wait to be told, gathered in the form in which they are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from wire.generation import RequestOutput, StepOutputs


class Outbox:
    """A request's outputs stay in their order; plain ones that follow one another become one.

    Of nearly all of them only tokens are told, so those need no object of their own.
    """

    def __init__(self, outputs: Iterable[RequestOutput] = ()) -> None:
        self._token_ids: dict[str, tuple[int, ...]] = {}
        self._outputs: list[RequestOutput] = []
        self._others_of: set[str] = set()
        """Requests with outputs among ``_outputs``: further ones stand behind those."""
        self.add_all(outputs)

    def __bool__(self) -> bool:
        return bool(self._token_ids or self._outputs)

    def add_tokens(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """An output of tokens and nothing else."""
        if request_id in self._others_of:
            self._outputs.append(RequestOutput(request_id, token_ids))
        elif request_id in self._token_ids:
            self._token_ids[request_id] += token_ids
        else:
            self._token_ids[request_id] = token_ids

    def add_all_tokens(self, token_ids: Mapping[str, tuple[int, ...]]) -> None:
        """As :meth:`add_tokens` for each."""
        for request_id, tokens in token_ids.items():
            self.add_tokens(request_id, tokens)

    def add(self, output: RequestOutput) -> None:
        if output.is_plain:
            self.add_tokens(output.request_id, output.token_ids)
        else:
            self._outputs.append(output)
            self._others_of.add(output.request_id)

    def add_all(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.add(output)

    def take(self) -> StepOutputs:
        """All that waits; nothing does any more."""
        taken = StepOutputs(self._token_ids, tuple(self._outputs))
        self._token_ids, self._outputs = {}, []
        self._others_of.clear()
        return taken
