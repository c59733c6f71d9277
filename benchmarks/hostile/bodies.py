"""Requests of hostile clients. Each differs from the one before, so that no cache helps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.hostile.connection import get, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
AMBIGUOUS = 'start: x\nx: x x | x x x | "a" | "aa" | "0" | "\\""'
"""Every text of a's has exponentially many derivations: each further token costs more than the previous
one."""
GRAMMAR_TOKENS = 400
NO_END = {"2": -100}
"""Suppresses the bundled model's end of sequence, so that answers are as long as the grammar allows."""
BIG_BYTES = 7_800_000
"""Below the router's default --max-body-size."""
MANY_ITEMS = 16_000
"""Items or messages of a request; the limit is 16,384."""
MANY_PARTS = 4_000
"""Parts of a content; the limit is 4,096."""
LADDER = tuple(
    {"n": n, "logprobs": logprobs, "max_tokens": max_tokens}
    for n, logprobs, max_tokens in (
        (128, 20, 4000),
        (128, 20, 1000),
        (128, 20, 200),
        (64, 20, 1000),
        (128, 5, 1000),
        (64, 20, 200),
        (32, 20, 1000),
        (16, 20, 1000),
        (128, 0, 1000),
        (8, 20, 4000),
    )
)
"""The most that an answer may contain, the most expensive first. A client that is refused asks for the
next."""

Requests = Iterator[bytes]
Messages = list[dict[str, str]]


def scrapes(model: str, client: int) -> Requests:
    """Asks for all metrics, for which nobody needs a key."""
    return itertools.repeat(get("/metrics"))


def ordinary(model: str, client: int) -> Requests:
    """Makes requests of a well-behaved client: its own prompt, an answer of 128 tokens."""
    for number in itertools.count():
        prompt = f"def client_{client}_{number}(values):\n    " + "return sum(values)\n    " * 8
        body = {"model": model, "prompt": prompt, "max_tokens": 128, "ignore_eos": True, "stream": True}
        yield post(COMPLETIONS, body)


# --- grammars -----------------------------------------------------------------------------------------


def _form(model: str, number: int, fields: dict[str, Any], max_tokens: int) -> bytes:
    body = {"model": model, "prompt": "a", "max_tokens": max_tokens, "stream": True}
    return post(COMPLETIONS, body | {"seed": number, "temperature": 1.0, "logit_bias": NO_END} | fields)


def grammar(model: str, client: int) -> Requests:
    """Makes starving grammars, by vLLM's older and newer field in turns; half of them have their own rule
    name."""
    for number in itertools.count(1000 * client):
        text = AMBIGUOUS if number % 4 < 2 else AMBIGUOUS.replace("x", f"x{number}")
        fields = {"guided_grammar": text} if number % 2 else {"structured_outputs": {"grammar": text}}
        yield _form(model, number, fields, GRAMMAR_TOKENS)


def _dear_pattern(number: int) -> str:
    return f"^(a{{{1000 - number % 400}}}){{1000}}$"


def compiling(model: str, client: int) -> Requests:
    """Makes schemas with a pattern of a million characters."""
    for number in itertools.count(50 * client):
        schema = {"type": "string", "pattern": _dear_pattern(number)}
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        yield _form(model, number, {"response_format": asked}, GRAMMAR_TOKENS)


def regex(model: str, client: int) -> Requests:
    for number in itertools.count(50 * client):
        yield _form(model, number, {"guided_regex": _dear_pattern(number)[1:-1]}, GRAMMAR_TOKENS)


def schema(model: str, client: int) -> Requests:
    """Makes automata with a state for every text: one of eight kinds of letter, many places before the
    end."""
    for number in itertools.count(50 * client):
        kinds = [{"type": "string", "pattern": f"^(.*{c}.{{{20 + number % 100}}})+$"} for c in "abcdefgh"]
        yield _form(
            model,
            number,
            {"guided_json": {"type": "array", "minItems": 50, "items": {"anyOf": kinds}}},
            GRAMMAR_TOKENS,
        )


def tools(model: str, client: int) -> Requests:
    for number in itertools.count(50 * client):
        fields = {"a": {"type": "string", "pattern": _dear_pattern(number)}}
        parameters = {"type": "object", "properties": fields, "required": ["a"]}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"call it {number}"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            "tool_choice": "required",
            "max_tokens": GRAMMAR_TOKENS,
            "stream": True,
        }
        yield post(CHAT, body)


# --- size ---------------------------------------------------------------------------------------------


def big_texts(model: str, client: int) -> Requests:
    """Makes bodies of 7.8 MB, to another endpoint each time; every client begins with a different
    endpoint."""
    text = "Twinfang hands it over. " * (BIG_BYTES // 24 - 20)
    ids = "[" + "7," * (BIG_BYTES // 2 - 200) + "7]"
    name = json.dumps(model)
    messages: Messages = [{"role": "user", "content": text}]
    makers: list[Callable[[], bytes]] = [
        lambda: post("/tokenize", {"model": model, "prompt": text}),
        lambda: post("/detokenize", f'{{"model":{name},"tokens":{ids}}}'.encode()),
        lambda: post(CHAT, {"model": model, "messages": messages, "max_tokens": 1}),
        lambda: post(COMPLETIONS, {"model": model, "prompt": text, "max_tokens": 1}),
        lambda: post(COMPLETIONS, f'{{"model":{name},"prompt":{ids},"max_tokens":1}}'.encode()),
        lambda: post("/tokenize", {"model": model, "messages": messages}),
    ]
    made = [make() for make in makers]
    yield from itertools.islice(itertools.cycle(made), 2 * client, None)


def big_conversations(model: str, client: int) -> Requests:
    """Makes long conversations of the APIs that have items and blocks: many short ones behind a long one,
    many of many parts, all of them nested as deep as they may be."""
    long = "Twinfang hands it over. " * (BIG_BYTES // 24 - 50_000)
    short = {"role": "system", "content": "a"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}
    text = {"type": "text", "text": "a"}
    parts = [{"role": "user", "content": [text] * MANY_PARTS}] * 20
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": [[]] * 1000}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text] * 1000}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}] * 40
    responses = {"model": model, "max_output_tokens": 1}
    messages = {"model": model, "max_tokens": 1}
    question = {"role": "user", "content": "a"}
    makers: list[Callable[[], bytes]] = [
        lambda: post(RESPONSES, responses | {"instructions": long, "input": [short] * (MANY_ITEMS - 6000)}),
        lambda: post(MESSAGES, messages | {"messages": [question, *turns]}),
        lambda: post(f"{RESPONSES}/input_tokens", responses | {"input": [thought] * MANY_ITEMS}),
        lambda: post(MESSAGES, messages | {"messages": [question] * MANY_ITEMS, "system": long}),
        lambda: post(RESPONSES, responses | {"input": parts}),
        lambda: post(f"{MESSAGES}/count_tokens", {"model": model, "messages": parts}),
    ]
    made = [make() for make in makers]
    yield from itertools.islice(itertools.cycle(made), 2 * client, None)


def stored_turn(model: str, number: int, previous_id: str | None) -> bytes:
    """Makes a request whose response is stored: the next turn of a conversation of many short turns."""
    body = {"model": model, "input": f"{number} {'is so and ' * 10}", "max_output_tokens": 1, "store": True}
    return post(RESPONSES, body if previous_id is None else body | {"previous_response_id": previous_id})


def many_choices(model: str, rung: int) -> bytes:
    """Makes the request of the rung of :data:`LADDER` that a client has reached."""
    return _dear_answer(model, LADDER[rung])


def alternatives(model: str, client: int) -> Requests:
    """Makes requests with few enough choices to run beside others, but with all log-probabilities of each of
    their tokens."""
    yield from itertools.repeat(_dear_answer(model, {"n": 28, "logprobs": 20, "max_tokens": 2000}))


def plain_choices(model: str, client: int) -> Requests:
    """Makes the requests of :func:`many_choices` and :func:`alternatives` without log-probabilities."""
    yield from itertools.repeat(_dear_answer(model, {"n": 28, "max_tokens": 2000}))


def plain_answers(model: str, client: int) -> Requests:
    """Makes :func:`long_answer` without log-probabilities."""
    yield from itertools.repeat(_dear_answer(model, {"n": 1, "max_tokens": 3000}))


def long_answer(model: str) -> bytes:
    """Makes a request whose answer has about six megabytes of events."""
    return _dear_answer(model, {"n": 1, "logprobs": 20, "max_tokens": 3000})


def _dear_answer(model: str, fields: dict[str, int]) -> bytes:
    body = {"model": model, "prompt": "a", "ignore_eos": True, "stream": True, "temperature": 1.0}
    return post(COMPLETIONS, body | fields)
