"""The flags that only ``twinfang batch`` has."""

from __future__ import annotations

from dataclasses import replace

from twinfang.endpoint import flags as endpoint
from twinfang.flags import table
from twinfang.flags.flag import Flag, FlagGroup
from twinfang.flags.values import existing_file, file_path, integer, positive, zero_or_more

INPUT = Flag(*("--input", "FILE", existing_file, "requests, one a line, in OpenAI's batch format"))
OUTPUT = Flag(
    *("--output", "FILE", file_path),
    "file of the answers; if it has answers to the input already, the batch continues behind them",
)
ERRORS = Flag(
    *("--errors", "FILE", file_path),
    "file of the lines that failed, made with the first one; may be that of --output",
    default_text="OUT.errors.jsonl beside an --output OUT.jsonl",
)
PRIORITY = Flag(
    *("--priority", "N", integer(-(2**31) + 1, 2**31 - 1)),
    "field `priority` of requests that have none: higher numbers wait for lower ones",
    default_text="100 where a router of Twinfang answers, else none",
)
CONCURRENCY = Flag(
    *("--concurrency", "N", integer(1, 1024), "most requests that are sent and not answered yet"),
    default_text="64; on a stack of its own 1.5 times what its servers run at once",
)
MAX_RETRIES = Flag(
    *("--max-retries", "N", integer(0, 100)),
    "how often a line that failed is sent again before it becomes an error, if failures of its kind may pass",
    default=8,
)
GIVE_UP_AFTER = Flag(
    *("--give-up-after", "SECONDS", positive("seconds")),
    "if the endpoint answers no line for so long, the batch ends unfinished, with exit code 3",
    default=600.0,
)
STOP_GRACE = Flag(
    *("--stop-grace", "SECONDS", zero_or_more("seconds")),
    "time that running answers have to end after Ctrl-C or SIGTERM; a second Ctrl-C ends them at once",
    default=30.0,
)
NUM_PREFILL = replace(
    table.NUM_PREFILL, default=None, default_text="none: one server of both roles, as `twinfang serve`"
)
NUM_DECODE = replace(table.NUM_DECODE, default=None, default_text="1 if --prefill is given")
LOG_LEVEL = replace(table.LOG_LEVEL, default="warning")

FILES = FlagGroup("files", (INPUT, OUTPUT, ERRORS))
SENDING = FlagGroup(
    "sending", (PRIORITY, CONCURRENCY, MAX_RETRIES, GIVE_UP_AFTER, STOP_GRACE, endpoint.TIMEOUT)
)
ENDPOINT = FlagGroup("a running endpoint", (endpoint.BASE_URL_OR_OWN, endpoint.API_KEY_FILE))
LOGS = FlagGroup("logs", (LOG_LEVEL, table.NAME))
