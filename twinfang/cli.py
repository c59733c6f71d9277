"""The command line.

| exit code | meaning |
|---|---|
| 0 | stopped on request |
| 1 | can't start or continue; one line gives the reason |
| 2 | a bad flag or environment variable; one line names it |
| 3 | `batch`: lines are left; the same command continues |
| 70 | a bug in Twinfang; the log has the traceback |
| 71 | the server's GPU failed or hangs; one line of the log says how |
| 130 | interrupted before start-up was complete |
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from telemetry.process_end import FAULT_EXIT_CODE
from twinfang.batch.unfinished import UNFINISHED_EXIT_CODE, UnfinishedError
from twinfang.collector import collector_paused
from twinfang.commands.command import Command
from twinfang.commands.spelling import with_flags
from twinfang.commands.table import COMMANDS
from twinfang.flags.flag import Flag, add_flags, resolve
from twinfang.grpc_settings import set_grpc_settings
from twinfang.lifeline import watch_lifeline
from twinfang.logs import configure_logs
from twinfang.turn import wait_for_turn
from wire.errors import ConfigError, TwinfangError

log = logging.getLogger(__name__)

INTERRUPTED_EXIT_CODE = 130

DESCRIPTION = "Serves hybrid Mamba-attention language models, with prefill and decode on separate servers."

ENVIRONMENT_NOTE = (
    "Every flag can be set in the environment too, --log-level as TWINFANG_LOG_LEVEL; the command line wins."
)
MAX_WIDTH = 100


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=_width())

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Keeps flags whole: argparse itself would break ``--metrics-port`` at its second hyphen."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """Reports an error as one line. The usage text of thirty flags would hide the error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class _ShowVersion(argparse.Action):
    """Reads the version only when it is asked for: that takes 30 ms, mostly for an import."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option: str | None = None
    ) -> None:
        import importlib.metadata

        print(f"twinfang {importlib.metadata.version('twinfang')}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given, unknown = _parser().parse_known_args(arguments)
    command: Command = given.command
    for flag in command.arguments:
        if unknown and not unknown[0].startswith("-"):
            _take_argument(flag, given, unknown)
    if unknown:
        given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    prog = f"twinfang {command.name}"
    if given.lifeline is not None:
        watch_lifeline(given.lifeline)
    try:
        values = resolve(command.groups, given, os.environ)
        if given.lifeline is not None:
            prog = values.name or prog  # started by another command: its user knows the name alone
        configure_logs(values.log_level, values.name or command.name)
        set_grpc_settings()
        with collector_paused():
            run = command.prepare(values)
        if given.turn is not None:
            wait_for_turn(given.turn)
    except ConfigError as error:
        return _fail(prog, error, 2)
    except ModuleNotFoundError as error:
        return _fail(prog, _missing(error), 1)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    try:
        run()
    except UnfinishedError as error:
        return _fail(prog, error, UNFINISHED_EXIT_CODE)
    except TwinfangError as error:
        return _fail(prog, error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except Exception:
        log.critical("ended by a fault", exc_info=True)
        return FAULT_EXIT_CODE
    return 0


def _take_argument(flag: Flag, given: argparse.Namespace, unknown: list[str]) -> None:
    """Takes the first unnamed value as the value of ``flag``."""
    if getattr(given, flag.dest) is not None:
        given.parser.error(f"both {flag.name} and {unknown[0]} are given: give one of them")
    taken = unknown.pop(0)
    setattr(given, flag.dest, [taken] if flag.repeatable else taken)


def _missing(error: ModuleNotFoundError) -> TwinfangError:
    """The error for a package that is missing. The routers' container image, for example, has no torch."""
    return ConfigError(
        f"the package {error.name} is not installed: the container image for routers runs only routers, use "
        "the image for servers; outside of containers, pip install twinfang"
    )


def _fail(prog: str, error: TwinfangError, code: int) -> int:
    print(f"{prog}: error: {with_flags(error.message)}", file=sys.stderr, flush=True)
    return code


def _usage(command: Command, prog: str) -> str:
    return " ".join([prog, *(f"[{flag.metavar}]" for flag in command.arguments), "[flags]"])


def _width() -> int:
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


def _wrapped(text: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, _width()) for paragraph in text.split("\n\n"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="twinfang", description=DESCRIPTION, formatter_class=_Formatter, allow_abbrev=False)
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="show program's version number and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        prog = f"twinfang {command.name}"
        sub = commands.add_parser(
            command.name,
            prog=prog,
            usage=_usage(command, prog),
            help=command.summary,
            description=_wrapped(command.description),
            epilog=f"{_wrapped(ENVIRONMENT_NOTE)}\n\nexample:\n  {command.example}",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        add_flags(sub, command.groups)
        sub.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
        sub.add_argument("--turn", type=int, help=argparse.SUPPRESS)
        sub.set_defaults(command=command, parser=sub)
    return parser
