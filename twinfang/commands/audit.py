"""``twinfang audit verify``: finds the first line of an audit log that was changed, removed or moved."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from wire.errors import ConfigError, TwinfangError


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares the command. Raises :class:`ConfigError` if no file is named."""
    if not values.file:
        raise ConfigError("which audit log? Give its file: twinfang audit verify FILE")

    def run() -> None:
        from router.audit.verification import verify

        try:
            verdict = verify(values.file, values.expect)
        except OSError as error:
            raise TwinfangError(f"the audit log can't be read: {error}") from error
        if verdict.fault:
            raise TwinfangError(f"{verdict.fault}; {verdict.num_lines} lines before that are as written")
        print(f"{verdict.num_lines} lines are as they were written, the last is {verdict.last}")

    return run
