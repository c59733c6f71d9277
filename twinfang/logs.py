"""Logs with one line for each event, as ``key=value``: time (UTC), level, process, logger, message.

    time=2026-01-31T12:00:00.000Z level=info process=decode-0 logger=telemetry.server_process msg="…"

A traceback follows as one more field with escaped line ends. So several processes can write to one stream,
and each line still shows its process.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

from twinfang.commands.spelling import with_flags

_OTHERS = ("asyncio", "grpc", "httpcore", "httpx", "httpx2", "numba", "py", "torch", "uvicorn", "urllib3")
"""Loggers of other packages. Their debug messages are not logged, and names of settings in their messages are
not replaced by Twinfang's flags."""

_TALKATIVE = ("httpx", "httpx2", "torch")
"""Loggers whose messages at level info nobody needs: one for each request, or of what torch has cached."""

_BARE = re.compile(r"[\w.:/+-]+")


class KeyValueFormatter(logging.Formatter):
    """Formats a record as ``key=value`` pairs."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = record.getMessage()
        fields = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "msg": text if record.name.partition(".")[0] in _OTHERS else with_flags(text),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: str) -> str:
    return value if _BARE.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def configure_logs(level: str, process: str) -> None:
    """Sends this process's log records of ``level`` and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _OTHERS:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.captureWarnings(True)
