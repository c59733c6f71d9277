"""Turns the names of settings into flags.

Errors and log lines name the field of a configuration in backticks. Users know the setting by its flag.

| written | read |
|---|---|
| `num_speculative` must be from 0 to 15 | --speculative must be from 0 to 15 |
| this would fit: `cache_memory_bytes` 2147483648 | this would fit: --cache-memory 2.00 |
"""

from __future__ import annotations

import math
import re

from twinfang.commands.table import COMMANDS

FLAGS = {
    flag.setting or flag.dest: flag
    for command in COMMANDS
    for group in command.groups
    for flag in group.flags
}
_SETTING = re.compile(rf"`({'|'.join(map(re.escape, FLAGS))})`(?: (\d+))?")


def with_flags(message: str) -> str:
    """Returns the message with settings written as flags. If a flag takes GiB, bytes become GiB, rounded
    up."""
    return _SETTING.sub(_flag, message)


def _flag(setting: re.Match[str]) -> str:
    flag, number = FLAGS[setting[1]], setting[2]
    if number and flag.metavar == "GIB":
        number = f"{math.ceil(int(number) / (1 << 30) * 100) / 100:.2f}"
    return f"{flag.name} {number}" if number else flag.name
