"""The flags of ``twinfang chat`` and ``twinfang complete``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from twinfang.endpoint import flags as endpoint
from twinfang.flags import table
from twinfang.flags.flag import Flag, FlagGroup
from twinfang.flags.values import integer, positive, some_text, zero_or_more


def between(least: float, most: float) -> Callable[[str], float]:
    """Returns a parser of a number from ``least`` to ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ValueError(f"expected a number from {least:g} to {most:g}")
        return value

    return parse


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


MODEL_NAME = Flag(
    *("--model-name", "NAME", some_text, "the model's name at the endpoint"),
    default_text="the first that the endpoint lists",
)
MESSAGE = Flag(
    *("--message", "TEXT", some_text, "one message; the command ends with the answer to it"),
    default_text="what is typed; if stdin is a file or a pipe, all of that as one message",
)
PROMPT = Flag(
    *("--prompt", "TEXT", some_text, "one text to continue; the command ends with its continuation"),
    default_text="what is typed; if stdin is a file or a pipe, all of that as one text",
)
SYSTEM = Flag("--system", "TEXT", some_text, "system prompt", default_text="none")

MAX_TOKENS = Flag("--max-tokens", "N", integer(1), "most tokens of an answer")
TEMPERATURE = Flag("--temperature", "X", zero_or_more("temperature"), "0: always the most likely token")
TOP_P = Flag("--top-p", "P", between(0, 1), "only the most likely tokens that have this share together")
TOP_K = Flag("--top-k", "N", integer(-1), "only so many of the most likely tokens; not known to OpenAI")
MIN_P = Flag(
    *("--min-p", "P", between(0, 1)),
    "only tokens that have this share of the most likely token's probability; not known to OpenAI",
)
SEED = Flag("--seed", "N", integer(-(2**63), 2**63 - 1), "the same seed gives the same answer")
STOP = Flag("--stop", "TEXT", some_text, "text that ends the answer; repeat for more", repeatable=True)
PRESENCE_PENALTY = Flag("--presence-penalty", "X", between(-2, 2), "against tokens that have occurred")
FREQUENCY_PENALTY = Flag("--frequency-penalty", "X", between(-2, 2), "the same, for each time they occurred")
REPETITION_PENALTY = Flag(
    *("--repetition-penalty", "X", positive("penalty")),
    "divides the logits of tokens that occurred, prompt included; not known to OpenAI",
)
REASONING_EFFORT = Flag(
    "--reasoning-effort", "LEVEL", some_text, "how much to think: none, low, medium, high"
)
EXTRA_BODY = Flag(
    *("--extra-body", "JSON", json_object),
    'further fields of the request: {"chat_template_kwargs": {"enable_thinking": false}}',
)
LOG_LEVEL = replace(table.LOG_LEVEL, default="warning")

_SAMPLING = (
    *(MAX_TOKENS, TEMPERATURE, TOP_P, TOP_K, MIN_P, SEED, STOP),
    *(PRESENCE_PENALTY, FREQUENCY_PENALTY, REPETITION_PENALTY),
)
ENDPOINT = FlagGroup(
    "endpoint",
    (endpoint.BASE_URL, endpoint.API_KEY_FILE, MODEL_NAME, replace(endpoint.TIMEOUT, default=600.0)),
)
CHAT = FlagGroup("chat", (MESSAGE, SYSTEM))
COMPLETE = FlagGroup("text", (PROMPT,))
_TITLE = "sampling; what is not given is left to the endpoint"
CHAT_SAMPLING = FlagGroup(_TITLE, (*_SAMPLING, REASONING_EFFORT, EXTRA_BODY))
COMPLETE_SAMPLING = FlagGroup(_TITLE, (*_SAMPLING, EXTRA_BODY))
LOGS = FlagGroup("logs", (LOG_LEVEL, table.NAME))


def body_fields(values: argparse.Namespace, group: FlagGroup) -> dict[str, Any]:
    """Returns the fields of a body that the flags of ``group`` set."""
    fields = {
        flag.dest: list(value) if flag.repeatable else value
        for flag in group.flags
        if flag is not EXTRA_BODY and (value := getattr(values, flag.dest)) not in (None, ())
    }
    return fields | (values.extra_body or {})
