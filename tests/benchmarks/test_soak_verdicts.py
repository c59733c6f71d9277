"""What a soak takes for right, for a clear error and for wrong, over real HTTP."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from benchmarks.soak.answer import Answer, Sending, ask
from benchmarks.soak.questions import Question

TOKENS = [11, 12, 13, 14]
EXPECTED = Answer(
    status=200, token_ids=TOKENS, text="abcd", finish_reason="length", num_tokens=4, is_ended=True
)
LOST = {"message": "it is gone", "type": "server_error", "param": None, "code": "no_server_available"}


def chunk(first, last, finish_reason=None):
    text = "abcd"[first:last]
    choice = {"text": text, "token_ids": TOKENS[first:last], "finish_reason": finish_reason}
    return {"choices": [choice], "usage": None}


USAGE = {"choices": [], "usage": {"completion_tokens": 4}}
WHOLE = [chunk(0, 1), chunk(1, 3), chunk(3, 4, "length"), USAGE]


def stream(*events, done=True):
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return 200, text + ("data: [DONE]\n\n" if done else "")


def whole(status, body):
    return status, json.dumps(body)


@pytest.fixture
def verdict():
    """Sends a request to a server that answers what the test says; the outcome."""
    replies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = replies.pop()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"

        def outcome(reply, *, streamed=True, cancel_after_events=None):
            replies.append(reply)
            sending = Sending(url, "soak-0", streamed, cancel_after_events=cancel_after_events)
            with httpx.Client() as client:
                return ask(client, Question("q", {"prompt": [1]}), sending, EXPECTED)

        yield outcome
        server.shutdown()


def test_the_undisturbed_answer_is_right(verdict):
    assert verdict(stream(*WHOLE)).verdict == "right"
    body = {**chunk(0, 4, "length"), "usage": {"completion_tokens": 4}}
    assert verdict(whole(200, body), streamed=False).verdict == "right"


def test_an_error_with_our_fields_is_a_clear_error(verdict):
    assert verdict(stream(chunk(0, 2), {"error": LOST})).code == "no_server_available"
    for streamed in (True, False):
        outcome = verdict(whole(503, {"error": LOST}), streamed=streamed)
        assert (outcome.verdict, outcome.code) == ("error", "no_server_available")


def test_a_client_that_goes_away_has_seen_the_beginning_of_the_answer(verdict):
    assert verdict(stream(*WHOLE), cancel_after_events=2).verdict == "cancelled"
    assert verdict(stream(chunk(0, 1), chunk(0, 1)), cancel_after_events=2).verdict == "wrong"


@pytest.mark.parametrize(
    "reply",
    [
        stream(*WHOLE, done=False),
        stream(chunk(0, 2), done=False),
        stream(chunk(0, 2)),
        stream(chunk(0, 2), chunk(1, 4, "length"), USAGE),
        stream(chunk(0, 2), chunk(3, 4, "length"), USAGE),
        stream(chunk(1, 2), {"error": LOST}),
        stream(chunk(0, 2), {"error": LOST}, chunk(2, 4, "length")),
        stream(chunk(0, 4, "stop"), USAGE),
        stream(chunk(0, 4, "length"), {"choices": [], "usage": {"completion_tokens": 5}}),
        whole(500, {"error": LOST | {"code": "internal_error"}}),
        whole(503, {"error": {"message": "it is gone"}}),
        (502, "<html>Bad Gateway</html>"),
    ],
    ids=[
        "no end",
        "cut off",
        "ended early",
        "a token twice",
        "a token is missing",
        "wrong before an error",
        "text behind an error",
        "another finish reason",
        "another count",
        "an error that says nothing",
        "fields are missing",
        "not ours",
    ],
)
def test_anything_else_is_wrong(verdict, reply):
    assert verdict(reply).verdict == "wrong"
