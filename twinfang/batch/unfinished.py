"""The error of a batch that has stopped before its end."""

from __future__ import annotations

from wire.errors import TwinfangError

UNFINISHED_EXIT_CODE = 3


class UnfinishedError(TwinfangError):
    """Some lines have no answer yet. The same command, given again, continues with them."""

    code = "unfinished"
