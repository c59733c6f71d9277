"""``twinfang chat`` and ``twinfang complete``: finds the endpoint and its model, then talks."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

from twinfang.endpoint.endpoint import Endpoint, endpoint_of
from twinfang.endpoint.model_list import model_list
from twinfang.talk.answer_stream import AnswerStream
from twinfang.talk.completion import Completion
from twinfang.talk.conversation import Conversation
from twinfang.talk.flags import CHAT_SAMPLING, COMPLETE_SAMPLING, body_fields
from twinfang.talk.terminal import Terminal
from wire.errors import ConfigError

MAX_SHOWN_MODELS = 5


def prepare_chat(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares ``twinfang chat``. Raises :class:`ConfigError` for a key that can't be read."""
    endpoint = endpoint_of(values, os.environ)
    fields = body_fields(values, CHAT_SAMPLING)

    def run(stream: AnswerStream, terminal: Terminal, model: str) -> None:
        chat = Conversation(stream, terminal, fields | {"model": model}, values.system)
        if values.message is not None:
            chat.answer(values.message)
        elif terminal.is_interactive:
            terminal.notice(f"Chat with {model} at {endpoint.base_url}. /help lists commands.")
            chat.run()
        else:
            chat.answer(_all_of(terminal, "--message"))

    return lambda: _talk(values, endpoint, run)


def prepare_complete(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares ``twinfang complete``. Raises :class:`ConfigError` for a key that can't be read."""
    endpoint = endpoint_of(values, os.environ)
    fields = body_fields(values, COMPLETE_SAMPLING)

    def run(stream: AnswerStream, terminal: Terminal, model: str) -> None:
        completion = Completion(stream, terminal, fields | {"model": model})
        if values.prompt is not None:
            completion.complete(values.prompt)
        elif terminal.is_interactive:
            terminal.notice(f"{model} at {endpoint.base_url} continues each text. Ctrl-D ends.")
            completion.run()
        else:
            completion.complete(_all_of(terminal, "--prompt"))

    return lambda: _talk(values, endpoint, run)


def _talk(
    values: argparse.Namespace,
    endpoint: Endpoint,
    run: Callable[[AnswerStream, Terminal, str], Any],
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    terminal = Terminal.standard()
    model = values.model_name or _first_model(endpoint, terminal)
    try:
        with closing(AnswerStream(endpoint)) as stream:
            run(stream, terminal, model)
    except BrokenPipeError:  # for example `twinfang complete … | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _first_model(endpoint: Endpoint, terminal: Terminal) -> str:
    names = model_list(endpoint).names
    if not names:
        raise ConfigError(f"{endpoint.base_url} lists no models: name one with --model-name")
    if len(names) > 1 and terminal.is_interactive:
        more = ", …" if len(names) > MAX_SHOWN_MODELS else ""
        terminal.notice(
            f"{endpoint.base_url} has {', '.join(names[:MAX_SHOWN_MODELS])}{more}; --model-name chooses"
        )
    return names[0]


def _all_of(terminal: Terminal, flag: str) -> str:
    text = terminal.read_all()
    if not text.strip():
        raise ConfigError(f"stdin is empty: type or pipe a text, or give it with {flag}")
    return text
