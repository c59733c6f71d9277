"""The flags of ``twinfang purge``."""

from __future__ import annotations

import re
from dataclasses import replace

from twinfang.flags.file_cache import FILE_CACHE_DIR, FILE_CACHE_KEY_FILE
from twinfang.flags.flag import Flag, FlagGroup
from twinfang.flags.values import yes_or_no, zero_or_more


def _key_name(text: str) -> str:
    if not re.fullmatch(r"[!-~]{1,512}", text):
        raise ValueError("expected the name of an API key, or tenant: and the tenant of a token")
    return text


def _salt(text: str) -> str:
    if not text:
        raise ValueError("expected a cache_salt that requests have sent")
    return text


DIRECTORY = replace(FILE_CACHE_DIR, help="directory that servers were given as --file-cache-dir")
OF_KEY = Flag(
    *("--of-key", "NAME", _key_name), "delete the prompts of this API key, or of tenant:NAME with tokens"
)
OF_SALT = Flag(
    *("--of-salt", "SALT", _salt), "delete the prompts of requests without a key that sent this cache_salt"
)
OLDER_THAN = Flag(
    *("--older-than", "HOURS", zero_or_more("hours")), "delete the files that were begun so long ago"
)
EVERYTHING = Flag(
    *("--everything", "", yes_or_no),
    "delete all prompts of all models",
    default=False,
    default_text="off",
    is_switch=True,
)
TARGETS = (OF_KEY, OF_SALT, OLDER_THAN, EVERYTHING)
GROUPS = (
    FlagGroup("files", (DIRECTORY, FILE_CACHE_KEY_FILE)),
    FlagGroup("what to delete (one of these)", TARGETS),
)
