"""Writes the answers of ``POST /v1/completions``: the whole object, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from router.api.openai.chunks import ChunkEvents, error_end, usage_object
from router.api.openai.logprobs import LogprobsTable, PromptTable, WrittenTable
from router.serving.answer import Answer, Delta
from router.serving.slice_lane import SLICE_WEIGHT, SliceLane
from router.serving.text_request import TextRequest
from router.serving.usage import Usage
from wire.errors import TwinfangError


class CompletionWriter:
    """Builds the JSON objects of one request from the deltas of its choices."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._events = ChunkEvents(request)
        self._tokenizer = request.model.tokenizer
        self._prompt_texts: dict[int, str] = {}
        self._prompt_tables: dict[int, WrittenTable] = {}
        """Log-probabilities of echoed prompts, already converted to JSON. All choices of a prompt share
        them."""
        self._kept: dict[int, WrittenTable] = {}
        """Log-probabilities of an answer that is not streamed, by choice, already converted to JSON."""
        self._head = {
            "id": request.id,
            "object": "text_completion",
            "created": request.created,
            "model": request.model.name,
        }

    async def begin(self, index: int, answer: Answer, slices: SliceLane) -> None:
        """Convert the log-probabilities of a choice's echoed prompt to JSON, one slice in each turn
        (:mod:`router.serving.slice_lane`). To be awaited before anything of the choice is written."""
        request, number = self._request, self._prompt_number(index)
        if not request.echo or request.logprobs is None or number in self._prompt_tables:
            return
        prompt, num_rows = request.prompts[number], SLICE_WEIGHT // (1 + request.logprobs)
        rows = PromptTable(
            prompt,
            answer.prompt_logprobs or (),
            self._tokenizer,
            skip_special_tokens=request.skip_special_tokens,
        )
        table = WrittenTable()
        for start in range(0, len(prompt.token_ids), num_rows):
            if start:
                await slices.turn()
            table.add(rows.next(num_rows))
        self._prompt_tables[number] = table

    def keep(self, index: int, delta: Delta) -> Delta:
        """Convert the log-probabilities in ``delta`` to JSON and keep them; return the rest of the delta.
        Only for answers that are not streamed."""
        if self._request.logprobs is None:
            return delta
        self._kept.setdefault(index, WrittenTable()).add(self._table(index, delta).columns)
        return replace(delta, logprobs=[], text_offsets=[])

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """Return the answer as one object; ``deltas[i]`` is all of choice i except what :meth:`keep` took."""
        choices = [self._choice(index, delta, is_first=True) for index, delta in enumerate(deltas)]
        return {**self._head, "choices": choices, "usage": usage_object(usage)}

    def written(self, index: int, delta: Delta, answer: Answer, *, is_first: bool) -> bytes:
        """Return the event for one choice's new delta. The first event of a choice also has its echoed
        prompt."""
        chunk = {**self._head, "choices": [self._choice(index, delta, is_first=is_first)]}
        return self._events.written([chunk], index, answer)

    def watched(self, index: int) -> str:
        """Return no character: a completion is all text."""
        return ""

    def end(self, usage: Usage) -> bytes:
        return self._events.end(self._head, usage)

    def error_end(self, error: TwinfangError) -> bytes:
        return error_end(error)

    def _choice(self, index: int, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        request = self._request
        echoes = request.echo and is_first
        choice: dict[str, Any] = {
            "index": index,
            "text": self._prompt_text(index) + delta.text if echoes else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if request.logprobs is not None:
            choice["logprobs"] = self._columns(index, delta, echoes=echoes)
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            prompt = request.prompts[self._prompt_number(index)]
            choice["prompt_token_ids"] = prompt.token_ids if is_first else None
        return choice

    def _columns(self, index: int, delta: Delta, *, echoes: bool) -> dict[str, Any]:
        table, kept = self._table(index, delta), self._kept.pop(index, None)
        if not echoes and kept is None:
            return table.columns
        written = self._prompt_tables[self._prompt_number(index)].copy() if echoes else WrittenTable()
        if kept is not None:
            written.extend(kept)
        written.add(table.columns)
        return written.columns

    def _table(self, index: int, delta: Delta) -> LogprobsTable:
        table = LogprobsTable(self._tokenizer)
        offset = len(self._prompt_text(index)) if self._request.echo else 0
        table.add(delta.logprobs, [offset + position for position in delta.text_offsets])
        return table

    def _prompt_number(self, index: int) -> int:
        return index // self._request.n

    def _prompt_text(self, index: int) -> str:
        number = self._prompt_number(index)
        if number not in self._prompt_texts:
            prompt, skip = self._request.prompts[number], self._request.skip_special_tokens
            text = prompt.text
            if text is None:
                text = self._tokenizer.decode(list(prompt.token_ids), skip_special_tokens=skip)
            self._prompt_texts[number] = text
        return self._prompt_texts[number]
