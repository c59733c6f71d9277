"""Command-line flags. Each is described once, and its value comes from one of three sources.

    the command line, else the environment variable TWINFANG_<FLAG>, else the default

This module checks each value alone. The configuration that is built from the values checks whether they fit
together. An error is one line that names the flag, the value and what was expected.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wire.errors import ConfigError

ENVIRONMENT_PREFIX = "TWINFANG_"


@dataclass(frozen=True)
class Flag:
    """One flag."""

    name: str
    """With the dashes: ``--max-model-len``."""
    metavar: str
    parse: Callable[[str], Any]
    """Turns text into the value. Raises ValueError that says what was expected."""
    help: str
    default: Any = None
    default_text: str | None = None
    """The default as the help text shows it, if the value itself would be unclear."""
    repeatable: bool = False
    """May be given several times, or comma-separated in the environment; the value is a tuple."""
    is_switch: bool = False
    """Takes no value on the command line, where its presence means yes. The metavar is empty."""
    setting: str = ""
    """The field of a configuration that the flag sets, if its name is not :attr:`dest`."""
    is_secret: bool = False
    """May contain a password, so children get it in their environment: everybody on the machine can read
    command lines."""
    is_internal: bool = False
    """Only commands give this flag, to processes that they start. Help does not show it."""

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.dest.upper()

    @property
    def described(self) -> str:
        """The help text, followed by the default."""
        text = self.default_text
        if text is None and self.default is not None:
            text = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return self.help if text is None else f"{self.help} (default: {text})"


@dataclass(frozen=True)
class FlagGroup:
    """Flags under one heading of the help text."""

    title: str
    flags: tuple[Flag, ...]


def add_flags(parser: argparse.ArgumentParser, groups: Iterable[FlagGroup]) -> None:
    """Declares the flags. Their values stay text until :func:`resolve`."""
    for group in groups:
        section = parser.add_argument_group(group.title)
        for flag in group.flags:
            text = argparse.SUPPRESS if flag.is_internal else flag.described.replace("%", "%%")
            if flag.is_switch:
                section.add_argument(flag.name, action="store_const", const="yes", help=text)
                continue
            action = "append" if flag.repeatable else "store"
            section.add_argument(flag.name, metavar=flag.metavar, action=action, help=text, default=None)


def resolve(
    groups: Iterable[FlagGroup], given: argparse.Namespace, environment: Mapping[str, str]
) -> argparse.Namespace:
    """Returns the value of every flag by :attr:`Flag.dest`. Raises :class:`ConfigError` for a bad value."""
    values = argparse.Namespace()
    for group in groups:
        for flag in group.flags:
            setattr(values, flag.dest, _value(flag, getattr(given, flag.dest), environment))
    return values


def _value(flag: Flag, given: Any, environment: Mapping[str, str]) -> Any:
    if given is not None:
        texts, source = (given if flag.repeatable else [given]), flag.name
    elif environment.get(flag.variable):
        text = environment[flag.variable]
        texts = [one.strip() for one in (text.split(",") if flag.repeatable else [text])]
        source = flag.variable
    else:
        return () if flag.repeatable else flag.default
    parsed = tuple(_parse(flag, text, source) for text in texts)
    return parsed if flag.repeatable else parsed[0]


def _parse(flag: Flag, text: str, source: str) -> Any:
    try:
        return flag.parse(text)
    except ValueError as error:
        hint = ""
        if source == flag.variable and "://" in text:
            hint = (
                f"; Kubernetes sets {source} if there is a Service named twinfang: "
                f"give {flag.name}, or set enableServiceLinks: false"
            )
        raise ConfigError(f"{source} {text!r}: {error}{hint}") from None


def as_arguments(flags: Iterable[Flag], values: argparse.Namespace) -> list[str]:
    """Returns a command line that gives another process the same values, except secret ones."""
    arguments: list[str] = []
    for flag in flags:
        if flag.is_secret:
            continue
        value = getattr(values, flag.dest)
        for item in value if flag.repeatable else (value,):
            if flag.is_switch:
                arguments += [flag.name] * bool(item)
            elif item is not None:
                arguments += [flag.name, str(item)]
    return arguments
