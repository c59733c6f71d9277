import asyncio
import json

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from router.models.folder import sampling_defaults
from router.models.tokenizer import INLINE_CHARS, Tokenizer
from testing.router.tokenizers import (
    BOS,
    EOS,
    byte_fallback,
    byte_level,
    byte_level_backend,
    write_model_dir,
)
from wire.errors import ModelLoadError


async def test_long_texts_are_encoded_like_short_ones_while_the_loop_goes_on():
    tokenizer = byte_level()
    text = "hello world 😀 " * (INLINE_CHARS // 4)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    token_ids = await tokenizer.encode(text)
    ticking.cancel()
    assert token_ids == tokenizer.encode_now(text)
    assert ticks > 1
    assert tokenizer.decode(token_ids) == text


def test_the_post_processor_adds_special_tokens_unless_told_not_to():
    backend = FastTokenizer.from_str(byte_level_backend().to_str())
    backend.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", BOS)])
    tokenizer = Tokenizer(backend)
    ids = byte_level().encode_now("hello")
    assert tokenizer.encode_now("hello") == [BOS, *ids]
    assert tokenizer.encode_now("hello", add_special_tokens=False) == ids


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}])
def test_prompts_are_tokenized_as_transformers_does(tmp_path, settings):
    from transformers import PreTrainedTokenizerFast

    folder = write_model_dir(tmp_path / "model", settings=settings)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours = Tokenizer.from_directory(folder)
    for text in ("hello world", "</s>hello<s>", "", "  Übergrößen 😀\n"):
        assert ours.encode_now(text) == theirs(text)["input_ids"]


def test_a_token_that_is_no_whole_text_is_named_by_its_bytes():
    tokenizer = byte_level()
    (first, *_rest) = tokenizer.encode_now("€")
    assert tokenizer.decode_token(first).startswith("bytes:\\xe2")
    assert tokenizer.decode_token(EOS) == "</s>"
    assert byte_fallback().decode_token(byte_fallback().encode_now("😀")[-1]) == "bytes:\\x80"


def test_ids_beyond_the_vocabulary_have_no_text():
    assert byte_level().decode_token(100_000) == ""


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"model": 1}'])
def test_an_unusable_tokenizer_file_is_named_in_the_error(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_sampling_defaults_come_from_the_checkpoint(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "min_p": None, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
    (tmp_path / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(ModelLoadError, match="top_p"):
        sampling_defaults(tmp_path)
