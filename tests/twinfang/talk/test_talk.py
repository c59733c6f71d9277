"""``twinfang chat`` and ``complete`` as a person meets them: on a terminal, and in pipes."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from testing.conditions import wait_until
from testing.openai_endpoint import Reply, openai_endpoint

SMALL = ("--cache-memory", "0.1", "--max-model-len", "2048")
TIMEOUT_S = 60.0
PROGRAM = (sys.executable, "-m", "twinfang")


class Screen:
    """A process on a terminal of its own."""

    def __init__(self, fd, process):
        self.fd, self.process, self.shown, self._seen = fd, process, "", 0

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, pattern, *, key=""):
        """Waits until ``pattern`` is shown behind what was waited for before. ``key`` is typed each second: a
        signal that comes just before Python waits for a key is handled at the next key."""
        limit = time.monotonic() + TIMEOUT_S
        while not (found := re.compile(pattern).search(self.shown, self._seen)):
            assert time.monotonic() < limit, f"{pattern} is not shown: {self.shown!r}"
            if select.select([self.fd], [], [], 1.0)[0]:
                self.shown += os.read(self.fd, 65536).decode(errors="replace")
            elif key:
                self.type(key)
        self._seen = found.end()
        return found[0]


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[Screen]:
    main, side = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "INPUTRC": os.devnull}
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=side,
        stdout=side,
        stderr=side,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its controlling terminal
    )
    os.close(side)
    try:
        yield Screen(main, process)
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.close(main)


def piped(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | environment,
        check=False,
    )


def chat_events(*deltas, end="stop"):
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": end}]}
    return Reply(200, [{"choices": [{"delta": {"role": "assistant"}}]}, *chunks, last, "[DONE]"])


def contents(call):
    return [(message["role"], message["content"]) for message in call.body["messages"]]


def test_a_chat_remembers_shows_thinking_dimmed_and_lets_no_text_rule_the_terminal():
    def answer(call):
        match call.body["messages"][-1]["content"]:
            case "think":
                return chat_events(
                    {"reasoning_content": "hmm\n"}, {"content": "it is "}, {"content": "seven\x1b[2J\x07!"}
                )
            case "break":
                return Reply(200, [{"error": {"message": "a server is gone"}}, "[DONE]"])
            case "refuse":
                return Reply(400, {"error": {"message": "too long"}})
            case _:
                return chat_events({"content": "as you like"}, end="length")

    flags = ("--system", "be brief", "--temperature", "0", "--stop", "END", "--max-tokens", "9")
    with (
        openai_endpoint(answer) as endpoint,
        on_a_terminal("chat", "--base-url", endpoint.url, *flags) as screen,
    ):
        screen.wait_for("large, small; --model-name chooses")
        screen.wait_for(r"Chat with large at http://\S+/v1\. /help lists commands\.")
        screen.type("think\n")
        screen.wait_for(r"\x1b\[2mhmm\r\n\x1b\[0m\r\nit is seven\ufffd\[2J\ufffd!\r\n")
        screen.type("refuse\n")
        screen.wait_for("error: HTTP 400: too long")
        screen.type("break\n")
        screen.wait_for("error: a server is gone")
        screen.type("two\\\nlines\n")
        screen.wait_for(r"as you like\r\n\S*\[the answer was cut")
        screen.type("/what\n")
        screen.wait_for("/what is no command")
        screen.type("/reset\n")
        screen.wait_for("forgotten")
        screen.type(" /end\n")
        screen.wait_for("as you like")
        screen.type("\x03")
        screen.wait_for("Ctrl-D or /exit ends the chat", key="\x03")
        screen.type("\n")  # says nothing, and takes a signal that is left
        screen.wait_for(r"> \r\n(.|\n)*> ", key="\n")
        screen.type("/exit\n")
        assert screen.process.wait(TIMEOUT_S) == 0
    system, thought = ("system", "be brief"), ("user", "think")
    said = ("assistant", "it is seven\x1b[2J\x07!")
    assert [contents(call) for call in endpoint.calls] == [
        [system, thought],
        [system, thought, said, ("user", "refuse")],
        [system, thought, said, ("user", "break")],
        [system, thought, said, ("user", "two\nlines")],
        [system, ("user", " /end")],
    ]
    first = endpoint.calls[0].body
    assert (first["model"], first["temperature"], first["stop"]) == ("large", 0, ["END"])
    assert (first["max_tokens"], first["stream"]) == (9, True)
    assert "top_p" not in first


def test_ctrl_c_ends_an_answer_and_not_the_program(stacks):
    stack = stacks("serve", *SMALL)
    flags = ("--base-url", stack.url, "--extra-body", '{"ignore_eos": true, "max_tokens": 450}')
    with on_a_terminal("chat", *flags) as screen:
        screen.wait_for("/help lists commands")
        for _ in range(2):
            screen.type("go on\n")
            screen.wait_for(r"> go on\r\n(.|\n){5}")
            screen.type("\x03")
            screen.wait_for(r"\[ended\]|\[the answer was cut", key="\x03")

        def has_ended() -> bool:
            with suppress(OSError):  # it has just ended
                screen.type("\x04")  # a terminal drops it while the program is not reading yet
            return screen.process.poll() is not None

        wait_until(has_ended, "Ctrl-D ends the chat", TIMEOUT_S)
        assert screen.process.returncode == 0
    stack.wait_until(stack.is_idle, "what nobody reads is given up")


def test_in_a_pipe_an_answer_is_its_text_alone(stacks):
    stack = stacks("serve", *SMALL)
    prompt = "def fibonacci(n):\n"
    body = {"model": stack.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    expected = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
    flags = ("--base-url", stack.url, "--max-tokens", "8", "--temperature", "0")
    ran = piped(prompt, "complete", *flags)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, expected["choices"][0]["text"], "")
    assert piped("not read", "complete", prompt, *flags).stdout == ran.stdout


def test_a_message_is_answered_without_its_thinking_where_nobody_watches():
    reply = chat_events({"reasoning": "hmm"}, {"content": "se\x1bven"}, {"content": "\n"})
    with openai_endpoint(lambda call: reply) as endpoint:
        flags = ("--base-url", endpoint.url, "--model-name", "mine", "--message", "3 + 4?")
        ran = piped("", "chat", *flags, TWINFANG_API_KEY="sesame")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "se\x1bven\n", "")
    (call,) = endpoint.calls
    assert contents(call) == [("user", "3 + 4?")]
    assert (call.body["model"], call.headers["authorization"]) == ("mine", "Bearer sesame")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(503, {"error": {"message": "no server"}}), "twinfang chat: error: HTTP 503: no server\n"),
        (
            Reply(200, [{"choices": [{"delta": {"content": "x"}}]}]),
            "the stream ended before the answer's end",
        ),
        (Reply(200, {"choices": []}), "text/event-stream"),
        (Reply(body=None), "the connection to "),
    ],
)
def test_an_answer_that_fails_is_one_line_and_exit_code_1(reply, said):
    with openai_endpoint(lambda call: reply) as endpoint:
        ran = piped("hello", "chat", "--base-url", endpoint.url)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1
