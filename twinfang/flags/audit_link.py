"""Parses the place of a line in an audit log."""

from __future__ import annotations

import re

from router.audit.line import Link

LINK = re.compile(r"(\d{1,15}):([0-9a-f]{64})")


def audit_link(text: str) -> Link:
    found = LINK.fullmatch(text)
    if found is None:
        raise ValueError("expected a line's number, a colon and its hash of 64 hexadecimal digits")
    return Link(int(found[1]), found[2])
