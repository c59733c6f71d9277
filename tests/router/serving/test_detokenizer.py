import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.serving.detokenizer import MAX_WINDOW_TOKENS, Detokenizer
from testing.router.tokenizers import EOS, byte_fallback, byte_level

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def byte_tokens(data: bytes) -> list[int]:
    return [BYTE_FALLBACK._backend.token_to_id(f"<0x{byte:02X}>") for byte in data]


any_tokens = st.lists(st.integers(0, 420), max_size=200)
"""Ids beyond the vocabulary of 400 included: padded embeddings can yield them."""
rare_bytes = st.lists(st.sampled_from(BYTE_LEVEL.encode_now("😀é€\u00a0")), max_size=150)


@given(st.one_of(any_tokens, rare_bytes), st.booleans())
@settings(max_examples=300)
def test_any_byte_level_tokens_give_the_text_of_decoding_them_at_once(token_ids, skip):
    pieces = pieces_of(Detokenizer(BYTE_LEVEL, skip_special_tokens=skip), token_ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)


@given(st.text(max_size=60), st.booleans())
def test_text_comes_back_in_whole_code_points(text, skip):
    pieces = pieces_of(Detokenizer(BYTE_LEVEL, skip_special_tokens=skip), BYTE_LEVEL.encode_now(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.text(alphabet="hello w é😀€", max_size=40))
def test_byte_fallback_tokens_give_the_text_of_decoding_them_at_once(text):
    token_ids = BYTE_FALLBACK.encode_now(text)
    pieces = pieces_of(Detokenizer(BYTE_FALLBACK), token_ids)
    assert "".join(pieces) == BYTE_FALLBACK.decode(token_ids) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, len(BYTE_FALLBACK._backend.get_vocab()) - 1), max_size=80))
def test_random_byte_fallback_tokens_give_the_text_of_decoding_at_once_if_it_is_valid(token_ids):
    at_once = BYTE_FALLBACK.decode(token_ids)
    shown = "".join(pieces_of(Detokenizer(BYTE_FALLBACK), token_ids))
    assert shown == at_once or "\ufffd" in at_once


def test_a_code_point_of_byte_tokens_is_shown_with_its_last_byte():
    detokenizer = Detokenizer(BYTE_FALLBACK, context=BYTE_FALLBACK.encode_now("hello"))
    assert [detokenizer.push(i) for i in byte_tokens("😀é".encode())] == ["", "", "", "😀", "", "é"]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("a😀".encode(), "a😀"),
        ("a😀".encode()[:-1], "a"),
        ("a😀".encode()[:2], "a"),
        ("a€".encode()[:-1], "a"),
        (b"a\xff", "a\ufffd"),
        (b"a\x80", "a\ufffd"),
        ("a\ufffd".encode(), "a\ufffd"),
    ],
)
def test_of_an_answer_that_ends_inside_a_code_point_that_one_is_left_out(tokenizer, data, shown):
    detokenizer = Detokenizer(tokenizer)
    token = byte_token if tokenizer is BYTE_LEVEL else lambda byte: byte_tokens(bytes([byte]))[0]
    assert "".join([*(detokenizer.push(token(byte)) for byte in data), detokenizer.finish()]) == shown


def test_invalid_bytes_before_a_code_point_that_has_begun_stay():
    detokenizer = Detokenizer(BYTE_LEVEL)
    data = b"\xf0\xf0\x9f"
    assert "".join([*(detokenizer.push(byte_token(byte)) for byte in data), detokenizer.finish()]) == "\ufffd"


def test_an_invalid_byte_does_not_take_back_what_was_shown():
    detokenizer = Detokenizer(BYTE_FALLBACK, context=BYTE_FALLBACK.encode_now("hello"))
    token_ids = [*byte_tokens("😀".encode() + b"\xf0"), *BYTE_FALLBACK.encode_now("hello")]
    assert "".join(pieces_of(detokenizer, token_ids)) == "😀\ufffd hello"


def test_an_answer_keeps_the_space_that_separates_it_from_the_prompt():
    prompt, answer = BYTE_FALLBACK.encode_now("hello"), BYTE_FALLBACK.encode_now("hello")
    assert "".join(pieces_of(Detokenizer(BYTE_FALLBACK, context=prompt), answer)) == " hello"
    assert "".join(pieces_of(Detokenizer(BYTE_FALLBACK), answer)) == "hello"


def test_the_space_after_a_skipped_special_token_stays():
    hello = BYTE_FALLBACK.encode_now("hello")
    token_ids = [*hello, EOS, EOS, *hello]
    assert "".join(pieces_of(Detokenizer(BYTE_FALLBACK), token_ids)) == BYTE_FALLBACK.decode(token_ids)


def test_special_tokens_are_shown_only_if_asked_for():
    token_ids = [*BYTE_LEVEL.encode_now("hello"), EOS]
    assert "".join(pieces_of(Detokenizer(BYTE_LEVEL), token_ids)) == "hello"
    assert "".join(pieces_of(Detokenizer(BYTE_LEVEL, skip_special_tokens=False), token_ids)) == "hello</s>"


def test_a_prompt_cut_inside_a_code_point_does_not_spoil_the_answer():
    first, *rest = BYTE_LEVEL.encode_now("€")
    assert rest
    detokenizer = Detokenizer(BYTE_LEVEL, context=[*BYTE_LEVEL.encode_now("price "), first])
    shown = "".join(pieces_of(detokenizer, [*rest, *BYTE_LEVEL.encode_now(" hello")]))
    assert shown.endswith(" hello")


@pytest.mark.parametrize("data", [b"\x80", b"\xf0\x9f\x98", b"\xe2\x82"])
def test_endless_invalid_bytes_keep_the_window_small(data):
    lookup = dict(zip(data, (BYTE_LEVEL._backend.token_to_id(_character(b)) for b in data), strict=True))
    token_ids = [lookup[byte] for byte in data * 200]
    detokenizer = Detokenizer(BYTE_LEVEL)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert len(detokenizer._window) <= MAX_WINDOW_TOKENS
    assert "".join(pieces) + detokenizer.flush() == BYTE_LEVEL.decode(token_ids)


def byte_token(byte: int) -> int:
    return BYTE_LEVEL._backend.token_to_id(_character(byte))


def _character(byte: int) -> str:
    from router.models.tokenizer import _byte_of_character

    return next(character for character, value in _byte_of_character().items() if value == byte)
