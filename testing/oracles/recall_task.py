"""The associative recall task: many `key=value;` pairs, then one key whose value the model must repeat.

    QX=402;ZP=913;…;?QX=      →  402

A key is two capital letters, a value three digits. The bundled model's tokenizer gives each of these
characters, and `=`, `;` and `?`, its own token. So lengths in tokens are lengths in characters, and no
tokenizer is needed to make a prompt of a wanted length. The model solves the task, so a key-value block or a
Mamba state that was lost, mixed up or read too late shows as wrong answers.

As a chat turn, the same question ends eight tokens before its answer, so the model must take the key from the
SSM state. The table counts correct answers when a part of h(N-1) is changed before the last prompt token is
run (100 prompts of 256 tokens):

| form | as it is | conv state zeroed | SSM state zeroed | another request's state |
|---|---|---|---|---|
| plain, `make_recall_prompt` | 100 | 0 | 100 | 3 |
| chat, `make_chat_recall_prompt` | 99 | 20 | 0 | 1 |

Pure Python: neither torch nor the tokenizer is needed.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace

PAIR_TOKENS = 7
"""Tokens of `QX=402;`."""
QUERY_TOKENS = 4
"""Tokens of `?QX=`."""
ANSWER_TOKENS = 3
"""Tokens of `402`: ask for this many, greedily."""
CHAT_BEFORE = "<|im_start|>user\n"
CHAT_AFTER = "<|im_end|>\n<|im_start|>assistant\n"
CHAT_TOKENS = 12
"""Tokens that the bundled model's chat template puts around a single user message: 4 before, 8 after."""
MIN_PROMPT_TOKENS = PAIR_TOKENS + QUERY_TOKENS
MAX_PAIRS = len(string.ascii_uppercase) ** 2
"""Keys are distinct within a prompt."""
MAX_PROMPT_TOKENS = MAX_PAIRS * PAIR_TOKENS + QUERY_TOKENS + PAIR_TOKENS - 1


@dataclass(frozen=True)
class RecallPrompt:
    """One question: greedy decoding of `prompt` for `ANSWER_TOKENS` tokens has to give `answer`."""

    prompt: str
    answer: str
    num_tokens: int
    """Length of `prompt` in tokens of the bundled model."""
    num_pairs: int
    pair_index: int
    """Index of the pair that is asked for, from the start."""

    def is_correct(self, completion: str) -> bool:
        """Returns whether the whole value matches exactly; the text after it does not matter."""
        return completion[: len(self.answer)] == self.answer


def random_key(rng: random.Random) -> str:
    """Two capital letters."""
    return rng.choice(string.ascii_uppercase) + rng.choice(string.ascii_uppercase)


def random_value(rng: random.Random) -> str:
    """Three digits."""
    return f"{rng.randrange(1000):03d}"


def distinct_keys(rng: random.Random, num_keys: int) -> list[str]:
    """`num_keys` different keys in random order."""
    numbers = rng.sample(range(MAX_PAIRS), num_keys)
    letters = string.ascii_uppercase
    return [letters[number // len(letters)] + letters[number % len(letters)] for number in numbers]


def make_recall_prompt(seed: int, length_tokens: int) -> RecallPrompt:
    """Returns the prompt of `seed`, of exactly `length_tokens` tokens.

    Leftover tokens that make no whole pair become digits in front of the first pair.
    Raises ValueError outside `MIN_PROMPT_TOKENS … MAX_PROMPT_TOKENS`.
    """
    if not MIN_PROMPT_TOKENS <= length_tokens <= MAX_PROMPT_TOKENS:
        raise ValueError(
            f"length_tokens is {length_tokens}, but a recall prompt has "
            f"{MIN_PROMPT_TOKENS} to {MAX_PROMPT_TOKENS} tokens"
        )
    rng = random.Random(f"recall {seed} {length_tokens}")
    num_pairs, num_filler = divmod(length_tokens - QUERY_TOKENS, PAIR_TOKENS)
    filler = "".join(rng.choice(string.digits) for _ in range(num_filler))
    keys = distinct_keys(rng, num_pairs)
    values = [random_value(rng) for _ in keys]
    pair_index = rng.randrange(num_pairs)
    pairs = "".join(f"{key}={value};" for key, value in zip(keys, values, strict=True))
    return RecallPrompt(
        prompt=f"{filler}{pairs}?{keys[pair_index]}=",
        answer=values[pair_index],
        num_tokens=length_tokens,
        num_pairs=num_pairs,
        pair_index=pair_index,
    )


def make_chat_recall_prompt(seed: int, length_tokens: int) -> RecallPrompt:
    """Returns a question of `length_tokens - CHAT_TOKENS` tokens for a chat. With the chat template it has
    `length_tokens` tokens.

    For a chat completion send `chat_content(prompt)` as the user's message.
    """
    recall = make_recall_prompt(seed, length_tokens - CHAT_TOKENS)
    prompt = f"{CHAT_BEFORE}{recall.prompt}{CHAT_AFTER}"
    return replace(recall, prompt=prompt, num_tokens=length_tokens)


def chat_content(recall: RecallPrompt) -> str:
    """The user's message in a chat recall prompt."""
    return recall.prompt.removeprefix(CHAT_BEFORE).removesuffix(CHAT_AFTER)


def recall_prompts(first_seed: int, num_prompts: int, length_tokens: int) -> Iterator[RecallPrompt]:
    """Yields plain prompts of consecutive seeds. The model has not seen them: training has its own
    generator."""
    for seed in range(first_seed, first_seed + num_prompts):
        yield make_recall_prompt(seed, length_tokens)


def chat_recall_prompts(first_seed: int, num_prompts: int, length_tokens: int) -> Iterator[RecallPrompt]:
    """Chat prompts of consecutive seeds."""
    for seed in range(first_seed, first_seed + num_prompts):
        yield make_chat_recall_prompt(seed, length_tokens)
