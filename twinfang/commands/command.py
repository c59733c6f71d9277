"""What a ``twinfang`` command is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from twinfang.flags.flag import Flag, FlagGroup


@dataclass(frozen=True)
class Command:
    """One ``twinfang`` command."""

    name: str
    summary: str
    description: str
    groups: tuple[FlagGroup, ...]
    example: str
    prepare: Callable[[argparse.Namespace], Callable[[], None]]
    """Builds the configuration from flag values and returns a function that runs the command in the
    foreground.

    Preparing raises :class:`ConfigError` for values that contradict one another. Running raises
    :class:`TwinfangError` if the command can't start or continue, and returns when it was asked to stop.
    """
    arguments: tuple[Flag, ...] = ()
    """The flags whose values may also be given without their names, in this order."""


def prepared_by(module: str, name: str = "prepare") -> Callable[[argparse.Namespace], Callable[[], None]]:
    """Returns the function ``name`` of a module that is imported when the command is used."""

    def prepare(values: argparse.Namespace) -> Callable[[], None]:
        prepared: Callable[[], None] = getattr(import_module(module), name)(values)
        return prepared

    return prepare
