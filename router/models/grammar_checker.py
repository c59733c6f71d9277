"""Has clients' grammars compiled in another process, and remembers the results.

Clients take turns at it. A result is remembered for requests of the same salt alone: how soon an answer comes
would tell one client which grammars another has used.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sys
from asyncio.subprocess import Process
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from router.http.bodies.bounded_turns import BoundedTurns
from router.http.bodies.turn_lane import TurnLane
from router.models.grammar_process import LENGTH, Question, Reply, pack, unpack
from wire.errors import GrammarError, TwinfangError
from wire.messages.sampling_params import MAX_GRAMMAR_BYTES

MAX_AT_ONCE = 8
"""Maximum number of grammars that are compiled at the same time. Further grammars wait."""
QUICK_S = 0.05
"""Processor time in which nearly all grammars are compiled. A grammar that takes longer waits in a separate
queue and is compiled again from the start, so that no quick grammar waits for it."""
MAX_CPU_S = 1.0
"""Processor time for a slow grammar. A schema of 100 kilobytes takes a fifth of this time."""
MAX_SLOW_AT_ONCE = 2
MAX_SLOW = 32
"""Maximum number of slow grammars that are being compiled or wait to be compiled. One client may have half of
those that others leave. A further slow grammar is refused."""
MAX_KEPT_BYTES = 8 << 20
"""Maximum size of all remembered results together."""
IDLE_S = 20.0
"""After this time without a question the process ends. The next question starts another process."""
MODULE = "router.models.grammar_process"


class Checked(NamedTuple):
    problem: str
    grammar: str


class GrammarChecker:
    """Compiles grammars in a process that the first question starts. Belongs to one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._quick = TurnLane(num_turns=MAX_AT_ONCE)
        self._slow = BoundedTurns(MAX_SLOW, "slow grammars", MAX_SLOW_AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked: dict[int, tuple[Process, asyncio.Future[Reply]]] = {}
        """For each question's number, the process that was asked and the reply to wait for."""
        self._idle: asyncio.TimerHandle | None = None
        self._kept: OrderedDict[bytes, Checked] = OrderedDict()
        self._num_kept_bytes = 0

    async def check(
        self, grammar: str, *, param: str, is_text: bool = False, client: str = "", salt: str = ""
    ) -> str:
        """Return the grammar in llguidance's form. ``is_text``: it is Lark or GBNF, as clients write it.

        A grammar that no request with the same ``salt`` has asked for is compiled in a turn of ``client``.

        Raises :class:`GrammarError`, with the library's message, for a grammar that can't be compiled, and
        for one that is too long or too hard to compile; and :class:`OverloadedError` if too many slow
        grammars of this client wait.
        """
        size = len(grammar.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"{param} makes a grammar of {size} bytes, the limit is {MAX_GRAMMAR_BYTES}: shorten it",
                param=param,
            )
        digest = _digest(grammar, is_text, salt)
        checked = self._kept.get(digest)
        if checked is None:
            reply = await self._compiled(grammar, is_text, client)
            checked = Checked(reply.problem, reply.grammar if is_text else "")
            self._keep(digest, checked)
        if checked.problem:
            raise GrammarError(f"{param} can't be enforced: {checked.problem}", param=param)
        return checked.grammar if is_text else grammar

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._process is None or self._reading is None:
            return
        self._reading.cancel()
        for _, reply in self._asked.values():
            reply.cancel()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _compiled(self, grammar: str, is_text: bool, client: str) -> Reply:
        reply = await self._quick.run(client, lambda: self._ask(grammar, is_text, QUICK_S, is_quick=True))
        if not reply.is_late:
            return reply
        return await self._slow.run(client, lambda: self._ask(grammar, is_text, MAX_CPU_S, is_quick=False))

    async def _ask(self, grammar: str, is_text: bool, max_cpu_s: float, *, is_quick: bool) -> Reply:
        process = await self._running()
        assert process.stdin is not None
        number = next(self._numbers)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = process, reply
        try:
            process.stdin.write(pack(Question(number, grammar, is_text, max_cpu_s, is_quick)))
            await process.stdin.drain()
            return await reply
        except ConnectionError as error:
            raise TwinfangError("the grammar could not be checked: its process has ended") from error
        finally:
            self._asked.pop(number, None)
            self._end_later(process)

    def _end_later(self, process: Process) -> None:
        """End the process when there has been nothing to check for a while, to free its memory."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = (
            None if self._asked else asyncio.get_running_loop().call_later(IDLE_S, self._end, process)
        )

    def _end(self, process: Process) -> None:
        if not self._asked and process.stdin is not None:
            process.stdin.close()
            self._process = None

    async def _running(self) -> Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    MODULE,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                self._reading = asyncio.create_task(self._read(self._process), name="grammar checks")
            return self._process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        try:
            while True:
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                reply = Reply(*unpack(await process.stdout.readexactly(length)))
                asked = self._asked.get(reply.number)
                if asked is not None and not asked[1].done():
                    asked[1].set_result(reply)
        except asyncio.IncompleteReadError:  # the process has ended; the next question starts another one
            await process.wait()
            for owner, future in self._asked.values():
                if owner is process and not future.done():
                    future.set_exception(TwinfangError("the grammar could not be checked: its process ended"))

    def _keep(self, digest: bytes, checked: Checked) -> None:
        if digest in self._kept:  # two requests asked for the same grammar at the same time
            return
        self._kept[digest] = checked
        self._num_kept_bytes += _size(checked)
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= _size(self._kept.popitem(last=False)[1])


@dataclass(frozen=True)
class OwnGrammars:
    """The checker, as the requests of one client with one salt see it."""

    checker: GrammarChecker
    client: str = ""
    salt: str = ""

    async def check(self, grammar: str, *, param: str, is_text: bool = False) -> str:
        """Check a grammar as :meth:`GrammarChecker.check` does."""
        return await self.checker.check(
            grammar, param=param, is_text=is_text, client=self.client, salt=self.salt
        )


def _digest(grammar: str, is_text: bool, salt: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16, key=b"text" if is_text else b"")
    for part in (salt, grammar):
        data = part.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8) + data)
    return digest.digest()


def _size(checked: Checked) -> int:
    return 256 + len(checked.problem) + len(checked.grammar)
