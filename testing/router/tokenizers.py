"""Small tokenizers of the two kinds that models use, made by the tests."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from router.models.tokenizer import Tokenizer

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
BOS, EOS = 1, 2
CHAT_TEMPLATE = """\
{% if tools %}<s>tools: {{ tools | tojson }}</s>{% endif %}
{% for message in messages %}
{% if message.role == "nobody" %}{{ raise_exception("nobody may not speak") }}{% endif %}
<s>{{ message.role }}
{{ message.content }}</s>
{% endfor %}
{% if add_generation_prompt %}<s>assistant
{% endif %}"""
TEXTS = ["hello world, this is a test of the router. Übergrößen und Æther: naïve café 😀"] * 20


@cache
def byte_level_backend() -> FastTokenizer:
    backend = FastTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def byte_level() -> Tokenizer:
    return Tokenizer(FastTokenizer.from_str(byte_level_backend().to_str()))


def byte_fallback() -> Tokenizer:
    """Returns a tokenizer like Llama 2's: `▁` for spaces, unknown characters as byte tokens, first space
    dropped."""
    pieces = [*SPECIAL_TOKENS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "é"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "w")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL_TOKENS)
    return Tokenizer(backend)


def with_marks(*marks: str) -> FastTokenizer:
    """Returns the byte-level tokenizer with a token of its own for each mark."""
    backend = FastTokenizer.from_str(byte_level_backend().to_str())
    backend.add_tokens(list(marks))
    return backend


def write_model_dir(
    folder: Path,
    *,
    settings: dict | None = None,
    generation: dict | None = None,
    marks: Sequence[str] = (),
) -> Path:
    """Writes the parts of a model folder that the router reads. Each of ``marks`` is a token of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with_marks(*marks).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE} | (settings or {})
        )
    )
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    return folder
