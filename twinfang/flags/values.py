"""Parsers of flag values. Each turns text into a value, or raises ValueError that says what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from router.config import LIMIT_STORE, LIMIT_STORE_FORMS, ModelAlias, ModelSource, ProcessPlace


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"expected an integer {bounds}")
        return value

    return parse


def positive(unit: str) -> Callable[[str], float]:
    """Returns a parser of a finite number above zero, in ``unit``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not value > 0 or math.isinf(value):
            raise ValueError(f"expected a number of {unit} above 0")
        return value

    return parse


def gibibytes(text: str) -> float:
    """Returns a number of GiB: ``8``, ``8G`` and ``8GiB`` are equal, and ``512M`` is a half."""
    parts = re.fullmatch(r"(.+?)(?:([GM])(?:iB)?)?", text)
    number, unit = parts.groups() if parts else ("", None)
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if not 0 <= size < math.inf:
        raise ValueError("expected a number of GiB of at least 0, such as 8, 8G or 512M")
    return size / 1024 if unit == "M" else size


def positive_gibibytes(text: str) -> float:
    """Returns a number of GiB above 0, written as for :func:`gibibytes`."""
    size = gibibytes(text)
    if not size:
        raise ValueError("expected a number of GiB above 0, such as 8, 8G or 512M")
    return size


def zero_or_more(unit: str) -> Callable[[str], float]:
    """Returns a parser of a finite number of at least zero, in ``unit``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < math.inf:
            raise ValueError(f"expected a number of {unit} of at least 0")
        return value

    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected {', '.join(choices[:-1])} or {choices[-1]}")
        return text

    return parse


def yes_or_no(text: str) -> bool:
    """Also accepts ``1`` and ``0``, which are usual in environment variables."""
    if text not in ("yes", "no", "1", "0"):
        raise ValueError("expected yes or no, 1 or 0")
    return text in ("yes", "1")


def port_or_off(text: str) -> int:
    """Returns a port; ``off`` becomes 0."""
    try:
        return 0 if text == "off" else integer(0, 65535)(text)
    except ValueError:
        raise ValueError("expected a port from 1 to 65535, or 0 or off for none") from None


def http_url(text: str) -> str:
    """Returns a base URL."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise ValueError("expected a URL, http://host:port")
    return text


def plain_http_url(text: str) -> str:
    """Returns the URL of a page that is requested without TLS."""
    if not re.fullmatch(r"http://[^/\s]+(/\S*)?", text):
        raise ValueError("expected a URL, http://host:port/path")
    return text


def some_text(text: str) -> str:
    if not text:
        raise ValueError("expected some text")
    return text


def model_directory(text: str) -> Path:
    """Returns the absolute path of a directory with a ``config.json``. Child processes may run in another
    working directory."""
    path = Path(text).expanduser()
    if not path.is_dir():
        raise ValueError("no such directory; give a Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise ValueError("there is no config.json in it; give a Hugging Face model directory")
    return path.resolve()


def model_source(text: str) -> ModelSource:
    """Parses ``NAME=DIR``, or a directory whose own name becomes the model's name."""
    name, sign, directory = text.partition("=")
    if not sign or Path(text).expanduser().is_dir():
        path = model_directory(text)
        return ModelSource(path.name, path)
    return ModelSource(some_text(name), model_directory(directory))


def model_alias(text: str) -> ModelAlias:
    name, _, model = text.partition("=")
    if not name or not model:
        raise ValueError("expected NAME=MODEL")
    return ModelAlias(name, model)


def process_place(text: str) -> ProcessPlace:
    """Parses ``INDEX:PORT,PORT,…``."""
    index, _, ports = text.partition(":")
    place = ProcessPlace(integer(0)(index), tuple(map(integer(1, 65535), ports.split(","))))
    if place.index >= len(place.ports):
        raise ValueError("expected the index of one of its ports")
    return place


def address(text: str) -> str:
    """Checks ``host:port`` of a server."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError("expected host:port with a port from 1 to 65535")
    return text


def addresses(text: str) -> tuple[str, ...]:
    """Parses ``host:port``, or ``host:first-last`` for servers on all of these ports."""
    start, dash, last = text.rpartition("-")
    if not dash or not start.rpartition(":")[2].isdigit():
        return (address(text),)
    host, _, first = address(start).rpartition(":")
    if not (last.isascii() and last.isdigit()) or not int(first) <= int(last) < 65536:
        raise ValueError("expected host:port, or host:first-last with the lower port first")
    return tuple(f"{host}:{port}" for port in range(int(first), int(last) + 1))


def existing_file(text: str) -> Path:
    """Returns an absolute path, because child processes may run in another working directory."""
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise ValueError("there is no such file")
    return path


def file_path(text: str) -> Path:
    """Returns the absolute path of a file that need not exist, but whose directory does."""
    path = Path(text).expanduser().absolute()
    if not path.parent.is_dir():
        raise ValueError(f"there is no directory {path.parent}")
    return path


def limit_store(text: str) -> str:
    """Checks where limits are counted. The path of an SQLite file becomes absolute."""
    if not LIMIT_STORE.fullmatch(text):
        raise ValueError(f"expected {LIMIT_STORE_FORMS}")
    kind, _, path = text.partition(":")
    return f"{kind}:{file_path(path)}" if kind == "sqlite" else text


def only(choice: str) -> Callable[[str], str]:
    """Returns a parser of a value that has only one choice so far."""

    def parse(text: str) -> str:
        if text != choice:
            raise ValueError(f"expected {choice}")
        return text

    return parse
