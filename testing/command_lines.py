"""Reads command lines in the same way as ``twinfang``."""

from __future__ import annotations

import argparse

from twinfang.commands.command import Command
from twinfang.commands.table import COMMANDS
from twinfang.flags.flag import add_flags, resolve

BY_NAME = {command.name: command for command in COMMANDS}


def parsed(command: Command, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, command.groups)
    return resolve(command.groups, parser.parse_args(arguments), {})
