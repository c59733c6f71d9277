"""The process that compiles clients' grammars: ``python -m router.models.grammar_process``.

A grammar of a few kilobytes can make the library overflow its stack, or take minutes or gigabytes. So each
grammar is compiled in its own copy of this process, with limits that the operating system enforces. Questions
come on the standard input and replies go to the standard output, in any order. Each message is its length,
followed by that many bytes of msgpack.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from llguidance import LLMatcher, LLParserLimits, grammar_from

from wire.idle_class import MAX_NICENESS, run_when_idle

MAX_BYTES = 256 << 20
MAX_MESSAGE_CHARS = 500
LENGTH = struct.Struct("<I")

_LIMITS = LLParserLimits(verbose_errors=False)


class Question(NamedTuple):
    number: int
    grammar: str
    is_text: bool
    """Whether the grammar is Lark or what vLLM calls EBNF (GBNF), as clients write it. Else it is in
    llguidance's form."""
    max_cpu_s: float
    """Processor time that compiling may take."""
    is_quick: bool
    """Whether compiling may take time from other work. A slow grammar is compiled only while no other process
    wants the processor."""


class Reply(NamedTuple):
    number: int
    problem: str
    """Why the grammar can't be compiled. Empty if it can."""
    grammar: str
    """The grammar in llguidance's form; empty if the question had it in this form already, or if compiling
    failed early."""
    is_late: bool = False
    """Whether compiling took all the processor time that it was given."""


def pack(message: Question | Reply) -> bytes:
    data: bytes = msgpack.packb(tuple(message), unicode_errors="surrogatepass")
    return LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> list[Any]:
    fields: list[Any] = msgpack.unpackb(data, unicode_errors="surrogatepass")
    return fields


def problem_of(grammar: str) -> str:
    """Return why the grammar can't be compiled. Empty if it can."""
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Rust's panic is no Exception and can't be imported
            raise
        return f"the library fails on it: {short(str(error))}"
    return short(messages[0]) if is_error else ""


def short(message: str) -> str:
    text = " ".join(message.removesuffix("<non-verbose/>").split())
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"


def _answer(question: Question) -> Reply:
    grammar = question.grammar
    if question.is_text:
        try:
            grammar = grammar_from("grammar", grammar)
        except (ValueError, RecursionError) as error:
            return Reply(question.number, short(str(error)), "")
    return Reply(question.number, problem_of(grammar), grammar if question.is_text else "")


class _Copy:
    """A copy of this process that works on one question. In the copy, the constructor answers and ends the
    process."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._answer = b""
        self.pipe, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _answer_and_end(question, writing)
        os.close(writing)

    def read(self) -> bytes:
        """Return the copy's answer once it has ended. Empty until then."""
        part = os.read(self.pipe, 1 << 16)
        self._answer += part
        if part:
            return b""
        os.close(self.pipe)
        _, status = os.waitpid(self._pid, 0)
        return pack(_failed(self._question, status)) if status else self._answer


def _answer_and_end(question: Question, writing: int) -> None:
    try:
        if question.is_quick:
            os.nice(MAX_NICENESS)
        else:
            run_when_idle()
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.setitimer(signal.ITIMER_PROF, question.max_cpu_s)  # its signal ends the process
        _write(writing, pack(_answer(question)))
        os._exit(0)
    finally:
        os._exit(1)


def _failed(question: Question, status: int) -> Reply:
    """Return the reply that follows from how the copy has ended."""
    code = os.waitstatus_to_exitcode(status)
    is_late = code == -signal.SIGPROF
    why = f"it needs more than {MAX_BYTES >> 20} MB of memory to compile"
    if is_late:
        why = f"it takes more than {question.max_cpu_s:g} s of processor time to compile"
    elif code == -signal.SIGSEGV:
        why = "its rules are nested too deeply"
    return Reply(question.number, f"{why}; make it simpler", "", is_late)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def main() -> None:
    """Compile grammars until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the process that started this one
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes about its crashes there
    copies: dict[int, _Copy] = {}
    buffer = b""
    while True:
        for file in select.select([0, *copies], [], [])[0]:
            if file in copies:
                if answer := copies[file].read():
                    del copies[file]
                    _write(1, answer)
                continue
            if not (part := os.read(0, 1 << 16)):
                return
            buffer += part
            while len(buffer) >= LENGTH.size and len(buffer) >= (end := LENGTH.size + _length(buffer)):
                copy = _Copy(Question(*unpack(buffer[LENGTH.size : end])))
                copies[copy.pipe], buffer = copy, buffer[end:]


def _length(buffer: bytes) -> int:
    length: int = LENGTH.unpack_from(buffer)[0]
    return length


if __name__ == "__main__":
    main()
