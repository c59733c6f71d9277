"""Turns token ids into text one by one, never showing half a code point."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from router.models.tokenizer import REPLACEMENT, Tokenizer

MAX_PARTIAL_CHARS = 3
"""An incomplete code point has at most three bytes, decoded to at most as many replacement characters."""
CONTEXT_TOKENS = 16
"""Enough to hold ``MAX_PARTIAL_CHARS`` characters whole, whatever the tokens before them are."""
MAX_WINDOW_TOKENS = 64


class Detokenizer:
    """Incremental decoding of one answer.

    A window of the latest tokens is decoded again with each new one, since what a token looks like
    may depend on its neighbours: bytes of a code point, a space that only the first token loses.
    Replacement characters at the end are held back, as later bytes may complete them. All pieces and
    :meth:`flush` together are what decoding the whole answer at once gives, behind the prompt's last
    tokens (``context``).

    One exception: with byte-fallback tokenizers (Llama 2), decoding at once turns a whole run of byte
    tokens into replacement characters if any of them is invalid; characters shown by then stay.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._own_text = tokenizer.own_text
        self._skip_special_tokens = skip_special_tokens
        self._window = [token_id for token_id in context[-CONTEXT_TOKENS:] if self._has_text(token_id)]
        self._text = self._decode()
        if self._text.endswith(REPLACEMENT):  # the prompt was cut inside a code point
            self._window, self._text = [], ""
        self._num_shown = len(self._text)
        """Characters of the window's text that were returned already, or belong to the context."""
        self._num_clean = len(self._window)
        """Tokens of the window up to the last point where nothing was held back."""

    def push(self, token_id: int) -> str:
        """The text that is certain once ``token_id`` has come; often empty."""
        own_text = self._own_text(token_id)
        if own_text is not None and self._num_shown == len(self._text) and self._text[-1:] != REPLACEMENT:
            # Nothing is held back, and nothing before it changes the token's text: no need to decode.
            self._window, self._text = [token_id], own_text
            self._num_shown, self._num_clean = len(own_text), 1
            return own_text
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        shown, self._text = self._text[: self._num_shown], self._decode()
        if not self._text.startswith(shown):  # an invalid byte reaches back to characters that were shown
            del self._window[: self._num_clean]
            self._text, self._num_shown, self._num_clean = self._decode(), 0, 0
        start, self._num_shown = self._num_shown, max(self._num_shown, self._num_certain())
        new_text = self._text[start : self._num_shown]
        if self._num_shown == len(self._text):
            self._end_cleanly(new_text)
        if len(self._window) > MAX_WINDOW_TOKENS:
            self._shorten_window()
        return new_text

    def flush(self) -> str:
        """What is still held back, when no token follows."""
        held, self._num_shown = self._text[self._num_shown :], len(self._text)
        return held

    def finish(self) -> str:
        """What :meth:`flush` returns, but a code point that has begun: who ended the answer cut it.

        Bytes that begin none stay replacement characters.
        """
        num_begun = self._num_begun()
        held = self.flush()
        return held[: max(0, len(held) - num_begun)]

    def _num_begun(self) -> int:
        """Replacement characters that stand for the beginning of a code point."""
        if not self._text.endswith(REPLACEMENT):
            return 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = decoder.decode(b"".join(bytes(self._tokenizer.token_bytes(i)) for i in self._window))
        begun, _ = decoder.getstate()
        if not begun:
            return 0
        # Byte-level BPE shows one character for such a beginning, byte fallback one for each byte.
        return 1 if _num_replaced(before) + 1 == _num_replaced(self._text) else len(begun)

    def _end_cleanly(self, new_text: str) -> None:
        if new_text:  # the tokens it came from are context enough for the next
            del self._window[: self._num_clean]
            self._text = self._decode()
            self._num_shown = len(self._text)
        self._num_clean = len(self._window)

    def _shorten_window(self) -> None:
        """Bounds the work per token where text never becomes certain, or tokens have none."""
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
        # Tokens without text were left out of the window: a special one counts as text from here on.
        return self._tokenizer.decode(self._window, skip_special_tokens=False) if self._window else ""


def _num_replaced(text: str) -> int:
    """Replacement characters at the end."""
    return len(text) - len(text.rstrip(REPLACEMENT))
