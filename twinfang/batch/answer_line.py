"""One line of a batch's output or of its errors: OpenAI's answer object.

{"id": "batch_req_…", "custom_id": "a-1", "response": {"status_code": 200, "request_id": "…", "body": {…}},
 "error": null}

The ``id`` names the input, by the beginning of its SHA-256, and the line that is answered. So a later call
knows what is done.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from twinfang.batch.request_line import RequestLine

DIGEST_LEN = 16
_ID = re.compile(rf"batch_req_([0-9a-f]{{{DIGEST_LEN}}})_([1-9][0-9]*)")
BEGINNING = b'{"id":"batch_req_'


@dataclass(frozen=True)
class Answer:
    """What a line has got in the end: a response, or an error if there was none."""

    status: int | None
    """None if no whole response came."""
    request_id: str = ""
    body: Any = None
    error_code: str = ""
    error_message: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the line belongs to the errors."""
        return self.status != 200

    @property
    def num_tokens(self) -> int:
        """The tokens that were generated, as the response counts them."""
        usage = self.body.get("usage") if isinstance(self.body, dict) else None
        if not isinstance(usage, dict):
            return 0
        count = usage.get("completion_tokens", usage.get("output_tokens"))
        return count if isinstance(count, int) else 0


def answer_line(digest: str, request: RequestLine, answer: Answer) -> bytes:
    """Returns the line, with its line end."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    error = {"code": answer.error_code, "message": answer.error_message}
    line = {
        "id": f"batch_req_{digest[:DIGEST_LEN]}_{request.number}",
        "custom_id": request.custom_id,
        "response": None if answer.status is None else response,
        "error": error if answer.status is None else None,
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True)
class AnsweredLine:
    """A line of the output or of the errors, read again."""

    digest: str
    """The beginning of the input's SHA-256."""
    number: int
    is_error: bool


def parse_answer(text: bytes) -> AnsweredLine | None:
    """Returns which line was answered; None if ``text`` is no answer of a batch."""
    try:
        line = orjson.loads(text)
        named = _ID.fullmatch(line["id"])
        response = line["response"]
        is_error = response is None or response["status_code"] != 200
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return None if named is None else AnsweredLine(named[1], int(named[2]), is_error)


def may_be_torn(text: bytes) -> bool:
    """Whether ``text``, the end of a file without a line end, is the beginning of an answer: what a process
    that was killed has written of it, or what a machine that lost power has left of it (zeros)."""
    return BEGINNING.startswith(text[: len(BEGINNING)]) or not text.strip(b"\0")
