"""One request as a client sends it, and its result: right, a clear error, or wrong."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from benchmarks.soak.questions import Question

ANSWER_TIMEOUT_S = 150.0
"""Longer than the routers' ``--request-timeout``: a client that waits so long gets an error from the router
first."""
CLEAR_CODES = frozenset(
    (
        "no_server_available",
        "transfer_failed",
        "handshake_refused",
        "lease_ended",
        "deadline_exceeded",
        "overloaded",
    )
)
"""Errors that name a failure outside of the request. Any other error, above all ``internal_error``, counts as
wrong."""
ERROR_FIELDS = {"message", "type", "param", "code"}

Verdict = Literal["right", "error", "cancelled", "wrong"]


@dataclass(frozen=True)
class Sending:
    """How a question is sent."""

    url: str
    request_id: str
    """Names the request in the logs of routers and servers."""
    stream: bool
    salt: str = ""
    """If not empty, no prefix cache knows any part of the prompt."""
    cancel_after_events: int | None = None
    """The client of a stream disconnects after this many events."""
    cancel_after_s: float | None = None
    """The client of an unstreamed answer disconnects after this many seconds."""


@dataclass
class Answer:
    """What a client has received so far."""

    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None
    """The number of tokens according to ``usage``."""
    error: dict[str, Any] | None = None
    is_ended: bool = False
    """Whether the answer is complete: the body's end, or ``[DONE]``, has arrived."""
    is_cancelled: bool = False
    problem: str = ""
    """A part of the answer that the client could not understand."""
    ttft_s: float | None = None
    longest_silence_s: float = 0.0
    """Longest time between two events of a stream."""


@dataclass(frozen=True)
class Outcome:
    """How one request ended."""

    question: str
    request_id: str
    verdict: Verdict
    code: str
    """The code of an error."""
    detail: str
    sent: float
    """``time.monotonic()``"""
    seconds: float
    ttft_s: float | None
    """To the first event of a stream."""
    longest_silence_s: float
    status: int
    """The HTTP status; 0 if none arrived."""


def ask(client: httpx.Client, question: Question, sending: Sending, expected: Answer) -> Outcome:
    """Sends a question and judges the answer."""
    sent = time.monotonic()
    answer = receive(client, question, sending)
    seconds = time.monotonic() - sent
    verdict, code, detail = judge(answer, expected)
    return Outcome(
        question.name,
        sending.request_id,
        verdict,
        code,
        detail,
        sent,
        seconds,
        answer.ttft_s,
        answer.longest_silence_s,
        answer.status,
    )


def receive(client: httpx.Client, question: Question, sending: Sending) -> Answer:
    """Returns what arrives, in any state; raises nothing."""
    answer, sent = Answer(), time.monotonic()
    url, headers = f"{sending.url}/v1/completions", {"X-Request-Id": sending.request_id}
    body = question.body | ({"cache_salt": sending.salt} if sending.salt else {})
    try:
        if sending.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            with client.stream("POST", url, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S) as response:
                _take_stream(response, sending, answer, sent)
        else:
            timeout_s = sending.cancel_after_s or ANSWER_TIMEOUT_S
            _take_whole(client.post(url, json=body, headers=headers, timeout=timeout_s), answer)
    except httpx.TimeoutException as error:
        if sending.cancel_after_s is not None:
            answer.is_cancelled = True
        else:
            answer.problem = f"no answer within {ANSWER_TIMEOUT_S:g} s: {type(error).__name__}"
    except httpx.HTTPError as error:
        answer.problem = f"the connection broke: {type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        answer.problem = f"an answer that can't be read: {type(error).__name__}: {error}"
    return answer


def _take_whole(response: httpx.Response, answer: Answer) -> None:
    data = response.json()
    answer.status, answer.is_ended = response.status_code, True
    answer.error = data.get("error")
    if answer.error is None:
        _add(data["choices"][0], answer)
        answer.num_tokens = data["usage"]["completion_tokens"]


def _take_stream(response: httpx.Response, sending: Sending, answer: Answer, sent: float) -> None:
    answer.status = response.status_code
    if answer.status != 200:
        response.read()
        answer.error, answer.is_ended = response.json()["error"], True
        return
    num_events, last_event = 0, sent
    for line in response.iter_lines():
        if not line:
            continue
        if answer.is_ended or not line.startswith("data: "):
            answer.problem = f"a line that does not belong there: {line[:80]!r}"
            return
        if line == "data: [DONE]":
            answer.is_ended = True
            continue
        now = time.monotonic()
        if answer.ttft_s is None:
            answer.ttft_s = now - sent
        else:
            answer.longest_silence_s = max(answer.longest_silence_s, now - last_event)
        last_event = now
        _take_event(json.loads(line.removeprefix("data: ")), answer)
        num_events += 1
        if num_events == sending.cancel_after_events:
            answer.is_cancelled = True
            return


def _take_event(event: dict[str, Any], answer: Answer) -> None:
    if answer.error is not None:
        answer.problem = "an event behind an error"
    if "error" in event:
        answer.error = event["error"]
        return
    for choice in event["choices"]:
        if answer.finish_reason is not None:
            answer.problem = "text behind the end of the answer"
        _add(choice, answer)
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]


def _add(choice: dict[str, Any], answer: Answer) -> None:
    answer.token_ids += choice.get("token_ids") or []
    answer.text += choice["text"]
    answer.finish_reason = choice["finish_reason"] or answer.finish_reason


def judge(answer: Answer, expected: Answer) -> tuple[Verdict, str, str]:
    """Returns the verdict, an error's code, and the fault."""
    if answer.problem:
        return "wrong", "", answer.problem
    if answer.token_ids != expected.token_ids[: len(answer.token_ids)]:
        return "wrong", "", difference(answer.token_ids, expected.token_ids)
    if answer.is_cancelled:
        return "cancelled", "", ""
    if not answer.is_ended:
        return "wrong", "", f"it ended without an error after {len(answer.token_ids)} tokens"
    if answer.error is not None:
        return _judge_error(answer)
    if (answer.status, answer.token_ids) != (200, expected.token_ids):
        return "wrong", "", difference(answer.token_ids, expected.token_ids)
    for name in ("text", "finish_reason", "num_tokens"):
        ours, theirs = getattr(answer, name), getattr(expected, name)
        if ours != theirs:
            return "wrong", "", f"{name} is {ours!r}, undisturbed {theirs!r}"
    return "right", "", ""


def _judge_error(answer: Answer) -> tuple[Verdict, str, str]:
    error = answer.error
    assert error is not None
    if set(error) != ERROR_FIELDS or not error["message"] or not 200 <= answer.status < 600:
        return "wrong", "", f"HTTP {answer.status} and an error that is none: {error}"
    detail = f"HTTP {answer.status}, {len(answer.token_ids)} tokens: {error['message']}"
    if error["code"] not in CLEAR_CODES:
        return "wrong", error["code"], f"{error['code']}: {detail}"
    return "error", error["code"], detail


def difference(got: list[int], expected: list[int]) -> str:
    """Returns where two answers differ first."""
    pairs = zip(got, expected, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    return (
        f"{len(got)} tokens, undisturbed {len(expected)}; from token {first} on "
        f"{got[first : first + 8]} instead of {expected[first : first + 8]}"
    )
