"""The model's tokenizer: text to token ids and back."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TypeVar

import orjson
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel

from router.heap import fitted, give_back
from router.http.bodies.bounded_turns import BoundedTurns
from router.models.json_files import read_json
from wire.errors import ModelLoadError

INLINE_CHARS = 2_000
"""Text up to this many characters is encoded on the event loop. That delays other requests less than passing
the work to another thread and back would."""

INLINE_TOKENS = 1_000
"""The same limit for decoding."""
NUM_THREADS = 2
MAX_LONG = 4096
"""How many long texts and lists of tokens may be worked on or wait for a thread."""
LARGE = 200_000
"""Number of characters or tokens. Work on so many leaves tens of megabytes of free memory in the process.
This memory is then returned to the operating system."""

REPLACEMENT = "\ufffd"

T = TypeVar("T")


class Tokenizer:
    """``tokenizer.json`` of a model folder.

    The file's post-processor alone decides about BOS and EOS. As in transformers 5, ``add_bos_token`` of
    tokenizer_config.json has no effect if there is a tokenizer.json.
    """

    def __init__(self, backend: FastTokenizer) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._turns = BoundedTurns(MAX_LONG, "long texts", NUM_THREADS)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        added = backend.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = isinstance(backend.decoder, ByteLevel)
        self.own_text = lru_cache(maxsize=1 << 20)(self._own_text)
        self.own_json = lru_cache(maxsize=1 << 20)(self._own_json)
        self.decode_token = lru_cache(maxsize=65536)(self._decode_token)
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    @classmethod
    def from_directory(cls, model_dir: Path) -> Tokenizer:
        path = model_dir / "tokenizer.json"
        read_json(path, required=True)  # says what is wrong more clearly than the library
        try:
            backend = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{path} can't be loaded: {error}") from error
        return cls(backend)

    def start(self) -> None:
        """Start the threads. By itself, a thread starts with the first long text, among the objects of that
        request's body, and what the thread keeps would keep a megabyte around it."""
        all_of_them = threading.Barrier(NUM_THREADS)
        for _ in range(NUM_THREADS):
            self._threads.submit(all_of_them.wait)

    async def encode(self, text: str, *, add_special_tokens: bool = True, client: str = "") -> list[int]:
        """Return the token ids of ``text``. A long text is encoded in another thread (the library releases
        the GIL), in a turn of ``client``. Raises :class:`OverloadedError` if too many long texts of this
        client wait for a thread."""
        encode = partial(self.encode_now, text, add_special_tokens=add_special_tokens)
        return encode() if len(text) <= INLINE_CHARS else await self._in_thread(encode, len(text), client)

    async def texts_of(self, token_ids: Sequence[int], *, client: str = "") -> list[str]:
        """Return the text of each token on its own, see :attr:`decode_token`. Many tokens are decoded as
        :meth:`decode_long` does."""
        decode: Callable[[], list[str]] = partial(list, map(self.decode_token, token_ids))
        num_tokens = len(token_ids)
        return decode() if num_tokens <= INLINE_TOKENS else await self._in_thread(decode, num_tokens, client)

    async def decode_long(
        self, token_ids: list[int], *, skip_special_tokens: bool = True, client: str = ""
    ) -> str:
        """Decode as :meth:`decode` does. Many tokens are decoded in another thread, in a turn of ``client``,
        so that the event loop is not blocked. Raises what :meth:`encode` raises."""
        decode = partial(self.decode, token_ids, skip_special_tokens=skip_special_tokens)
        num_tokens = len(token_ids)
        return decode() if num_tokens <= INLINE_TOKENS else await self._in_thread(decode, num_tokens, client)

    async def _in_thread(self, work: Callable[[], T], size: int, client: str) -> T:
        """Run ``work`` in one of two threads, once it is the turn of ``client``. ``size`` is the size of its
        input, in characters or tokens."""
        loop = asyncio.get_running_loop()
        return await self._turns.run(
            client, lambda: loop.run_in_executor(self._threads, _then_give_back, work, size)
        )

    def encode_now(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The only call of the library that skips character offsets, which nothing here needs.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether a token has any text. Padded vocabularies have ids above those of the tokenizer;
        such ids have no text."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def _own_text(self, token_id: int) -> str | None:
        """Return the text that a token always adds after other text, if the other text does not end within a
        code point.

        None for special tokens and for tokens that have parts of code points or no text. Also None if the
        decoder is not that of byte-level BPE: only that decoder is known to join the bytes of all tokens and
        to do nothing else.
        """
        if not self._is_byte_level or not self.has_text(token_id, skip_special_tokens=True):
            return None
        text = self.decode([token_id], skip_special_tokens=False)
        return text if text and REPLACEMENT not in text else None

    def _own_json(self, token_id: int) -> bytes | None:
        """Return :attr:`own_text` as JSON; None if it is None."""
        text = self.own_text(token_id)
        return None if text is None else fitted(orjson.dumps(text))

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text. None if there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def added_id(self, text: str) -> int | None:
        """Return the id of the token that this text always becomes, wherever it stands. None if the text may
        be divided in other ways."""
        return self._added_ids.get(text)

    def _decode_token(self, token_id: int) -> str:
        """Return the text of one token on its own, as log-probabilities name it.

        A token that is not complete UTF-8 becomes ``bytes:\\xe2\\x82``, as in OpenAI's API. Written with
        replacement characters, many such tokens would look the same.
        """
        text = self.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT not in text:
            return text
        data = self._backend_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _token_bytes(self, token_id: int) -> tuple[int, ...]:
        """Return the bytes that a token stands for, even if they are half a character."""
        text = self.decode([token_id], skip_special_tokens=False)
        return tuple(self._backend_bytes(token_id) if REPLACEMENT in text else text.encode())

    def _backend_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):  # byte fallback
            return bytes([int(match[1], 16)])
        try:
            return bytes(_byte_of_character()[character] for character in token)
        except KeyError:
            return token.encode()

    @cached_property
    def max_token_chars(self) -> int | None:
        """The maximum number of characters of a prompt that one token stands for. None if a normalizer may
        shorten the prompt first."""
        if self._backend.normalizer is not None:
            return None
        return max(len(token) for token in self._backend.get_vocab(with_added_tokens=True))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _then_give_back(work: Callable[[], T], size: int) -> T:
    result = work()
    if size >= LARGE:
        give_back()
    return result


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return the table of the 256 characters that byte-level BPE writes, with the byte that each character
    stands for (GPT-2's encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
