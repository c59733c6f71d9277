"""Builds the text of one choice from the tokens that a decode server sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.models.reasoning.thinking_tokens import ThinkingTokens
from router.models.tokenizer import Tokenizer
from router.serving.detokenizer import Detokenizer
from router.serving.stop_strings import StopStrings
from wire.messages.generation import RequestOutput, RequestStats, TokenLogprobs
from wire.messages.sampling_params import SamplingParams


@dataclass(slots=True)
class Delta:
    """The new text and tokens of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    """For each token with log-probabilities, the number of the answer's characters before it."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or token id that ended the answer. None: the answer has not ended, or the
    end-of-sequence token or the limit of its length ended it."""

    def __iadd__(self, later: Delta) -> Delta:
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text_offsets += later.text_offsets
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        return self


class Answer:
    """Turns one choice's outputs into deltas: decodes tokens, finds stop strings, counts tokens.

    It handles tokens one by one, so the answer does not depend on how many came in one step. The answer ends
    with the token that completes a stop string; later tokens of the same step are dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        eos_token_ids: frozenset[int] = frozenset(),
        thinking: ThinkingTokens | None = None,
    ) -> None:
        self.detokenizer = Detokenizer(
            tokenizer, context=prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._stops = StopStrings(stop, include_in_output=include_stop_str_in_output)
        self._params = params
        self._include_stop = include_stop_str_in_output
        self._silent_stops = frozenset() if params.ignore_eos else eos_token_ids
        self._thinking = thinking
        self._num_chars = 0
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.stats: RequestStats | None = None

    def push(self, output: RequestOutput) -> Delta:
        """Return the delta for the server's next output, which must not be an error. This must not be called
        after the answer has ended."""
        delta = Delta("", [], [], [])
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        for i, token_id in enumerate(output.token_ids):
            delta.token_ids.append(token_id)
            if output.logprobs is not None:
                delta.text_offsets.append(self._num_chars)
                delta.logprobs.append(output.logprobs[i])
            self.num_tokens += 1
            ends = output.stop_token_id is not None and i == len(output.token_ids) - 1
            if not ends or self._include_stop:
                self._show(delta, self.detokenizer.push(token_id))
            if self._stops.matched is not None:
                return self._finish(delta, "stop", self._stops.matched)
        if output.finish_reason is not None:
            self.stats = output.stats
            self._show(delta, self.detokenizer.finish())
            if self._stops.matched is not None:
                return self._finish(delta, "stop", self._stops.matched)
            delta.text += self._stops.flush()
            silent = output.stop_token_id in self._silent_stops
            return self._finish(delta, output.finish_reason, None if silent else output.stop_token_id)
        return delta

    def push_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, for callers that need only the text. This must not be called for answers
        with stop strings."""
        self.num_tokens += len(token_ids)
        push = self.detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
        self._num_chars += len(text)
        return text

    def find_thinking(self, delta: Delta) -> None:
        """Look for the thinking in the newest delta. To be called for every delta that no lane has
        written."""
        if self._thinking is not None:
            self._thinking.push(delta.token_ids, self.num_tokens)

    @property
    def num_thinking_tokens(self) -> int | None:
        """How many of the tokens are thinking. None if that is not known."""
        return None if self._thinking is None else self._thinking.among(self.num_tokens)

    def _show(self, delta: Delta, text: str) -> None:
        self._num_chars += len(text)
        delta.text += self._stops.push(text, armed=self.num_tokens > self._params.min_tokens)

    def _finish(self, delta: Delta, reason: str, stop_reason: int | str | None) -> Delta:
        self.finish_reason = delta.finish_reason = reason
        delta.stop_reason = stop_reason
        return delta
