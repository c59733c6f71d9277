"""Turns token ids into text one by one, and holds back a code point until it is complete."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from router.models.tokenizer import REPLACEMENT, Tokenizer

MAX_PARTIAL_CHARS = 3
"""An incomplete code point has at most three bytes, so it is decoded to at most three replacement
characters."""
CONTEXT_TOKENS = 16
"""This many tokens always contain ``MAX_PARTIAL_CHARS`` complete characters, whatever tokens come before
them."""
MAX_WINDOW_TOKENS = 64


class Detokenizer:
    """Incremental decoding of one answer.

    A window of the latest tokens is decoded again with each new token, because the text of a token may depend
    on its neighbours. A token may be a part of a code point, or begin with a space that is dropped only if
    the token is the first one. Replacement characters at the end are held back, because later bytes may
    complete them. The pieces that :meth:`push` returns, followed by the text that :meth:`flush` returns, are
    the same text as if the whole answer were decoded at once, after the prompt's last tokens (``context``).

    One exception: with byte-fallback tokenizers (Llama 2), decoding at once turns a whole run of byte tokens
    into replacement characters if any of them is invalid. This class can't take back characters that it has
    already returned, so they stay.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._own_text = tokenizer.own_text
        self._skip_special_tokens = skip_special_tokens
        self._context: Sequence[int] | None = context[-CONTEXT_TOKENS:]
        """The context; None once the window holds tokens. Most answers begin with a token of its own text, so
        that the context need not be decoded."""
        self._window: list[int] = []
        self._text = ""
        """The window's text."""
        self._num_shown = 0
        """How many characters of the window's text were returned already, or belong to the context."""
        self._num_clean = 0
        """The number of the window's tokens up to the last point where nothing was held back."""
        self.is_clean = True
        """Whether nothing is held back, so that a token with a text of its own adds just this text."""
        self._last_own: int | None = None
        """The last token, if the window is nothing but this token, which has a text of its own."""

    def push(self, token_id: int) -> str:
        """Return the further text that is certain now that ``token_id`` has come. This text is often
        empty."""
        if self.is_clean and (own_text := self._own_text(token_id)) is not None:
            self.pass_over(token_id)
            return own_text
        if not self._has_text(token_id):
            return ""
        if self._last_own is not None:
            self._window, self._text = [self._last_own], self._own_text(self._last_own) or ""
            self._num_shown, self._num_clean = len(self._text), 1
            self._last_own = self._context = None
        elif self._context is not None:
            self._begin_with(self._context)
        self._window.append(token_id)
        shown, self._text = self._text[: self._num_shown], self._decode()
        if not self._text.startswith(shown):  # an invalid byte changes characters that were shown already
            del self._window[: self._num_clean]
            self._text, self._num_shown, self._num_clean = self._decode(), 0, 0
        start, self._num_shown = self._num_shown, max(self._num_shown, self._num_certain())
        new_text = self._text[start : self._num_shown]
        if self._num_shown == len(self._text):
            self._end_cleanly(new_text)
        if len(self._window) > MAX_WINDOW_TOKENS:
            self._shorten_window()
        self.is_clean = self._num_shown == len(self._text) and self._text[-1:] != REPLACEMENT
        return new_text

    def pass_over(self, token_id: int) -> None:
        """Note a token with a text of its own, which the caller has found out. To be called only while
        :attr:`is_clean`. Earlier tokens do not change this token's text, so nothing has to be decoded."""
        self._last_own = token_id

    def _begin_with(self, context: Sequence[int]) -> None:
        self._context = None
        self._window = [token_id for token_id in context if self._has_text(token_id)]
        self._text = self._decode()
        if self._text.endswith(REPLACEMENT):  # the prompt was cut inside a code point
            self._window, self._text = [], ""
        self._num_shown, self._num_clean = len(self._text), len(self._window)

    def flush(self) -> str:
        """Return the text that is still held back. To be called when no token follows."""
        held, self._num_shown = self._text[self._num_shown :], len(self._text)
        return held

    def finish(self) -> str:
        """Return what :meth:`flush` returns, but without a last code point that the end of the answer has
        cut.

        Bytes that can't begin a code point are still returned as replacement characters.
        """
        num_begun = self._num_begun()
        held = self.flush()
        return held[: max(0, len(held) - num_begun)]

    def _num_begun(self) -> int:
        """How many replacement characters at the end stand for the beginning of a code point."""
        if not self._text.endswith(REPLACEMENT):
            return 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = decoder.decode(b"".join(bytes(self._tokenizer.token_bytes(i)) for i in self._window))
        begun, _ = decoder.getstate()
        if not begun:
            return 0
        # Byte-level BPE shows one character for a code point that has begun, byte fallback one for each byte.
        return 1 if _num_replaced(before) + 1 == _num_replaced(self._text) else len(begun)

    def _end_cleanly(self, new_text: str) -> None:
        if new_text:  # the new text's tokens are enough context for the next one
            del self._window[: self._num_clean]
            self._text = self._decode()
            self._num_shown = len(self._text)
        self._num_clean = len(self._window)

    def _shorten_window(self) -> None:
        """Bound the work per token if text never becomes certain, or tokens decode to nothing."""
        num_held = len(self._text) - self._num_shown
        del self._window[:-CONTEXT_TOKENS]
        self._text = self._decode()
        self._num_shown = len(self._text) - num_held
        self._num_clean = 0 if num_held else len(self._window)

    def _num_certain(self) -> int:
        return len(self._text) - min(_num_replaced(self._text), MAX_PARTIAL_CHARS)

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special_tokens)

    def _decode(self) -> str:
        # Tokens without text are not in the window, so special tokens in it are to be shown.
        return self._tokenizer.decode(self._window, skip_special_tokens=False) if self._window else ""


def _num_replaced(text: str) -> int:
    """How many replacement characters ``text`` ends with."""
    return len(text) - len(text.rstrip(REPLACEMENT))
