"""What an answer means for the line that was sent.

| answer | means |
|---|---|
| 200 with a JSON body | done |
| 429 | not now: this line waits, as long as ``Retry-After`` says |
| 503, no connection | the endpoint is away: all lines wait |
| 408, 409, 425, 500, 502, 504, a lost connection, a body that is no JSON | failed: may succeed next time |
| 401 | the key is refused: the batch stops |
| any other status | done: an error that would come again |
"""

from __future__ import annotations

import email.utils
import time
from dataclasses import dataclass
from enum import Enum, auto

import httpx2
import orjson

from twinfang.batch.answer_line import Answer
from twinfang.endpoint.refusal import message_of, transport_message

FAILED_STATUSES = (408, 409, 425, 500, 502, 504)
MAX_RETRY_AFTER_S = 300.0


class Meaning(Enum):
    """What to do with the line."""

    DONE = auto()
    BUSY = auto()
    AWAY = auto()
    FAILED = auto()
    KEY_REFUSED = auto()


@dataclass(frozen=True)
class Outcome:
    """How one try of a line has ended."""

    meaning: Meaning
    answer: Answer
    """What the line gets if it is not tried again."""
    reason: str
    """For people, empty for an answer."""
    retry_after_s: float | None = None
    """When the endpoint wants to be asked again."""
    was_sent: bool = True
    """False if no connection came about: then nobody has seen the line."""


def outcome_of(response: httpx2.Response, content: bytes) -> Outcome:
    """Returns what a whole response means."""
    status, retry_after_s = response.status_code, _retry_after(response.headers.get("Retry-After", ""))
    request_id = response.headers.get("X-Request-Id", "")
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = content.decode(errors="replace")
    reason = "" if status == 200 else message_of(status, content)
    answer = Answer(status, request_id, body)
    if status == 200 and isinstance(body, str):
        reason = "HTTP 200 with a body that is no JSON"
        answer = Answer(None, error_code="invalid_answer", error_message=reason)
        return Outcome(Meaning.FAILED, answer, reason)
    meaning = Meaning.DONE
    if status in FAILED_STATUSES:
        meaning = Meaning.FAILED
    elif status in _MEANINGS:
        meaning = _MEANINGS[status]
    return Outcome(meaning, answer, reason, retry_after_s)


def outcome_of_error(error: httpx2.TransportError, url: str) -> Outcome:
    """Returns what the absence of a response means."""
    reason = transport_message(error, url)
    is_away = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)
    answer = Answer(None, error_code="connection_lost", error_message=reason)
    return Outcome(Meaning.AWAY if is_away else Meaning.FAILED, answer, reason, was_sent=not is_away)


_MEANINGS = {401: Meaning.KEY_REFUSED, 429: Meaning.BUSY, 503: Meaning.AWAY}


def _retry_after(text: str) -> float | None:
    """Returns the seconds of ``Retry-After``, which has a number or a date."""
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    return min(max(0.0, moment.timestamp() - time.time()), MAX_RETRY_AFTER_S)
