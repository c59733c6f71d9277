import asyncio
import json
import threading

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from router.models import tokenizer as tokenizer_module
from router.models.folder import sampling_defaults
from router.models.tokenizer import INLINE_CHARS, NUM_THREADS, Tokenizer
from testing.conditions import until
from testing.router.tokenizers import (
    BOS,
    EOS,
    byte_fallback,
    byte_level,
    byte_level_backend,
    write_model_dir,
)
from wire.errors import ModelLoadError, OverloadedError


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


LONG = "hello world " * 5_000


async def test_a_client_s_long_text_waits_for_few_of_another_client_s():
    tokenizer, order = byte_level(), []

    async def encode(client):
        await tokenizer.encode(LONG, client=client)
        order.append(client)

    tasks = [asyncio.create_task(encode("bob")) for _ in range(40)]
    await asyncio.sleep(0)
    await asyncio.gather(*tasks, asyncio.create_task(encode("alice")))
    assert len(order) == 41
    assert order.index("alice") <= 10


async def test_texts_of_who_has_left_are_not_encoded(monkeypatch):
    tokenizer, begun, may_end = byte_level(), [], threading.Event()
    encode_now = tokenizer.encode_now

    def encode(text, **options):
        begun.append(text)
        assert may_end.wait(20)
        return encode_now(text, **options)

    monkeypatch.setattr(tokenizer, "encode_now", encode)
    tasks = [asyncio.create_task(tokenizer.encode(LONG, client="bob")) for _ in range(20)]
    await until(lambda: len(begun) == NUM_THREADS)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    mine = asyncio.create_task(tokenizer.encode(LONG + "!", client="alice"))
    await asyncio.sleep(0)
    may_end.set()
    await mine
    assert begun == [LONG] * NUM_THREADS + [LONG + "!"]


async def test_only_so_many_long_texts_of_a_client_wait(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_LONG", 8)
    tokenizer = byte_level()
    ends = await asyncio.gather(
        *(tokenizer.encode(LONG, client="bob") for _ in range(6)),
        tokenizer.encode("short", client="bob"),
        tokenizer.encode(LONG, client="alice"),
        tokenizer.decode_long([300] * 2_000, client="bob"),
        return_exceptions=True,
    )
    refused = [end for end in ends if isinstance(end, OverloadedError)]
    assert [type(end) for end in ends[:4]] == [list] * 4
    assert [type(end) for end in ends[6:8]] == [list] * 2
    assert len(refused) == 3
    assert refused[0].message.startswith("4 long texts of this client wait, the limit is 4: send")
    assert await tokenizer.encode(LONG, client="bob")


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
