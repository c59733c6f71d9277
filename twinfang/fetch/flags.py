"""The flags of ``twinfang fetch-model``."""

from __future__ import annotations

import re
from pathlib import Path

from twinfang.flags.flag import Flag
from twinfang.flags.values import existing_file, integer, positive, yes_or_no


def source(text: str) -> str:
    if not re.fullmatch(r"(https?://[^/\s]+(/\S*)?|s3://[^/\s]+(/\S*)?|file:/\S*)", text):
        raise ValueError("expected https://HOST/PATH, s3://BUCKET/PREFIX or file:/PATH")
    return text


def new_directory(text: str) -> Path:
    """Returns an absolute path. Neither it nor the directory that it is in has to exist."""
    path = Path(text).expanduser().absolute()
    if not path.name:
        raise ValueError("expected a directory that can be created or replaced, and not a root")
    return path


SOURCE = Flag(
    *("--source", "SOURCE", source),
    "where the model's files are: the URL below which config.json is found (of a hub: "
    "https://HOST/MODEL/resolve/VERSION), s3://BUCKET/PREFIX, or file:/PATH",
)
DIRECTORY = Flag(
    *("--directory", "DIR", new_directory),
    "the directory that the model becomes; it is created when all files are there and checked",
)
WITHOUT_WEIGHTS = Flag(
    *(
        "--without-weights",
        "",
        yes_or_no,
        "only what a router reads: tokenizer, chat template, configuration",
    ),
    default=False,
    default_text="off",
    is_switch=True,
)
TOKEN_FILE = Flag(
    *("--token-file", "FILE", existing_file),
    "file with a token that the host of SOURCE gets as Authorization: Bearer, over https alone",
    default_text="none",
)
CONNECTIONS = Flag(
    *("--connections", "N", integer(1, 64), "number of weight files fetched at a time"), default=4
)
TIMEOUT = Flag(
    *("--timeout", "SECONDS", positive("seconds")),
    "time for all of it; what has come by then is kept, and the next call continues",
    default=3600.0,
)
