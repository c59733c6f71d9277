"""Grammars that answers must follow, and who follows one with an answer. The library is llguidance.

A grammar is compiled when the first request brings it. What tokens mean is read from the model's
``tokenizer.json``, when the first grammar comes: a server without either never loads it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from numpy.typing import NDArray

from wire.errors import GrammarError, ModelLoadError

log = logging.getLogger(__name__)

KEPT_GRAMMARS = 32
"""Compiled grammars that are kept for requests to come: the n choices of one, and clients with one schema."""
MAX_MESSAGE_CHARS = 500


class Matcher:
    """Follows one answer. It says what may come next, and is told what came."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def advance(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these. What the grammar forbids is an :attr:`error` from then on."""
        self._matcher.consume_tokens(list(token_ids))

    @property
    def error(self) -> GrammarError | None:
        """What keeps it from going on: a token that was not allowed, or a limit of the library's."""
        if not self._matcher.is_error():
            return None
        return GrammarError(f"the grammar can't be followed: {_short(self._matcher.get_error())}")

    @staticmethod
    def fill(
        executor: LLExecutor, wanted: Sequence[tuple[Matcher, int, list[int]]], masks: NDArray[np.int32]
    ) -> None:
        """Writes what each one allows into ``masks`` ``[n, W]``: with ``(matcher, i, drafts)`` into row i
        what may follow the answer, into row i + j what may follow its first j drafts.

        Rows behind a draft that is not allowed, or that ends the answer, stay as they are. The matchers stay
        where they are. One that fails has an :attr:`error` then.
        """
        able = [(one._matcher, row, drafts) for one, row, drafts in wanted if one.error is None]
        plain = [(matcher, row) for matcher, row, drafts in able if not drafts]
        drafting = [entry for entry in able if entry[2]]
        if plain:
            fill_next_token_bitmask_par(executor, plain, masks)
        if drafting:
            fill_next_token_bitmask_par_with_draft_tokens(executor, drafting, masks)


class Grammars:
    """Compiles for one model. From any thread."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = model_dir / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._limits = LLParserLimits(verbose_errors=False)  # messages go to clients and logs
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str, answer: Sequence[int] = ()) -> Matcher:
        """Follows a new answer, or one of which another server has generated ``answer``.

        Takes milliseconds, a second at worst: not to be called on an event loop. Raises
        :class:`GrammarError`, and :class:`ModelLoadError` where there is no tokenizer to be read.
        """
        matcher = Matcher(self._compile(grammar).deep_copy())
        matcher.advance(answer)
        if matcher.error is not None:
            raise matcher.error
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
            tokenizer = self._load_tokenizer()
        compiled = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if compiled.is_error():
            raise GrammarError(f"the grammar can't be compiled: {_short(compiled.get_error())}")
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is not None:
            return self._tokenizer
        if not self._eos_token_ids:
            raise ModelLoadError(
                "answers can't follow a grammar with this model: its config.json names no end of sequence"
            )
        began = time.monotonic()
        try:
            text = self._path.read_text(encoding="utf-8")
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except OSError as error:
            raise ModelLoadError(
                f"answers can't follow a grammar here: {self._path} can't be read: {error}; put the model's "
                "tokenizer.json there and restart this server"
            ) from error
        except ValueError as error:
            raise ModelLoadError(
                f"answers can't follow a grammar with this model: {self._path} does not say what bytes its "
                f"tokens stand for: {error}"
            ) from error
        log.info("loaded %s for a grammar in %.1f s", self._path, time.monotonic() - began)
        self._tokenizer = tokenizer
        return tokenizer


def _short(message: Any) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"
