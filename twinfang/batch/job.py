"""Sends the lines of a batch until none is left, a bounded number at a time.

:mod:`twinfang.batch.tries` says when a line is sent again. If no line is taken for ``give_up_after_s``, the
batch ends unfinished. The line that was tried last becomes an error if it was sent more than ``max_retries``
times: it may be the cause, and the next call would meet it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import orjson

from twinfang.batch.answer_files import AnswerFiles
from twinfang.batch.answer_line import Answer, answer_line
from twinfang.batch.input_file import CheckedInput
from twinfang.batch.outcome import Meaning, Outcome, outcome_of, outcome_of_error
from twinfang.batch.pace import Pace
from twinfang.batch.progress import Progress
from twinfang.batch.request_line import RequestLine
from twinfang.batch.tries import Tries
from twinfang.batch.unfinished import UnfinishedError
from twinfang.endpoint.endpoint import Endpoint

log = logging.getLogger(__name__)

SYNC_INTERVAL_S = 1.0
MAX_ANSWER_BYTES = 256 << 20
TOO_LARGE = f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB"


@dataclass(frozen=True)
class JobSettings:
    """How lines are sent."""

    concurrency: int
    """Most lines that are sent and not answered yet."""
    max_retries: int
    give_up_after_s: float
    stop_grace_s: float
    """Time that running answers have to end when the batch is stopped."""
    priority: int | None
    """For bodies that have none; None: bodies stay as they are."""


class Job:
    """One batch on one endpoint."""

    def __init__(
        self,
        checked: CheckedInput,
        files: AnswerFiles,
        endpoint: Endpoint,
        settings: JobSettings,
        progress: Progress,
    ) -> None:
        self._checked = checked
        self._requests: Iterator[RequestLine] = checked.requests(files.done)
        self._files = files
        self._endpoint = endpoint
        self._settings = settings
        self._progress = progress
        self._pace = Pace(time.monotonic, settings.give_up_after_s)
        self._num_running = 0
        self._given_up = ""
        """Why the batch ends though lines are left."""
        self._stop = asyncio.Event()
        self._stop_at_once = asyncio.Event()

    def request_stop(self) -> None:
        """Lets :meth:`run` send nothing more and return when running answers have ended; a second request
        ends them."""
        if self._stop.is_set():
            self._stop_at_once.set()
        self._stop.set()

    async def run(self) -> None:
        """Returns when every line is done, or after :meth:`request_stop`. Raises :class:`UnfinishedError` if
        the batch can't go on now. What was answered is then in the files."""
        async with self._endpoint.async_client(self._settings.concurrency) as client:
            workers = [asyncio.create_task(self._work(client)) for _ in range(self._settings.concurrency)]
            helpers = [
                asyncio.create_task(part)
                for part in (_ended(workers), self._keep_on_disk(), self._end_late(workers))
            ]
            try:
                done, _ = await asyncio.wait(helpers[:2], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (*workers, *helpers):
                    task.cancel()
                await asyncio.gather(*workers, *helpers, return_exceptions=True)
        self._files.sync()

    async def _keep_on_disk(self) -> None:
        """Flushes the files and shows progress every second."""
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            await asyncio.to_thread(self._files.sync)
            self._progress.show()

    async def _end_late(self, workers: list[asyncio.Task[None]]) -> None:
        """Ends the workers that still run when the grace of a stop is over."""
        await self._stop.wait()
        try:
            async with asyncio.timeout(self._settings.stop_grace_s):
                await self._stop_at_once.wait()
        except TimeoutError:
            log.warning("%d answers were not complete in time and are given up", self._num_running)
        for worker in workers:
            worker.cancel()

    async def _work(self, client: httpx2.AsyncClient) -> None:
        while not self._stop.is_set():
            request = next(self._requests, None)
            if request is None:
                return
            answer = await self._answer(client, request)
            if answer is not None:
                line = answer_line(self._checked.digest, request, answer)
                self._files.add(request.number, line, is_error=answer.is_error)
                self._progress.add(answer)
            if self._given_up and self._files.num_done < self._checked.num_requests:
                raise UnfinishedError(self._given_up)

    async def _answer(self, client: httpx2.AsyncClient, request: RequestLine) -> Answer | None:
        """Returns the line's answer, after as many tries as it needs; None if the batch ends before."""
        content = self._content(request)
        tries = Tries(self._pace, self._settings.max_retries)
        while await self._until_open():
            outcome = await self._try(client, request, content)
            if outcome.meaning is Meaning.DONE:
                self._pace.answered()
                return outcome.answer
            if outcome.meaning is Meaning.KEY_REFUSED:
                raise UnfinishedError(
                    f"{self._endpoint.base_url} refuses the API key: {outcome.reason}; give another with "
                    "--api-key-file"
                )
            wait_s = tries.failed(outcome)
            if wait_s is None:
                return outcome.answer
            if self._pace.is_given_up and not self._num_running:
                self._given_up = (
                    f"no line was answered for {self._settings.give_up_after_s:g} s: {outcome.reason}"
                )
                return outcome.answer if tries.are_many else None
            log.info("line %d will be sent again: %s", request.number, outcome.reason)
            self._progress.note(outcome.reason)
            await self._pause(wait_s)
        return None

    async def _try(self, client: httpx2.AsyncClient, request: RequestLine, content: bytes) -> Outcome:
        url = self._endpoint.base_url
        self._num_running += 1
        try:
            async with client.stream(
                "POST", f"{url}{request.path}", content=content, headers={"Content-Type": "application/json"}
            ) as response:
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        answer = Answer(None, error_code="answer_too_large", error_message=TOO_LARGE)
                        return Outcome(Meaning.DONE, answer, TOO_LARGE)
                return outcome_of(response, bytes(body))
        except httpx2.TransportError as error:
            return outcome_of_error(error, url)
        except httpx2.DecodingError as error:
            text = f"the answer can't be decompressed: {error}"
            return Outcome(
                Meaning.FAILED, Answer(None, error_code="invalid_answer", error_message=text), text
            )
        finally:
            self._num_running -= 1

    def _content(self, request: RequestLine) -> bytes:
        body = request.body
        if self._settings.priority is not None and body.get("priority") is None:
            body = body | {"priority": self._settings.priority}
        return orjson.dumps(body)

    async def _until_open(self) -> bool:
        """Waits while the endpoint is away. Returns whether the batch goes on."""
        while (wait_s := self._pace.wait_s) > 0 and await self._pause(wait_s):
            pass
        return not self._stop.is_set()

    async def _pause(self, seconds: float) -> bool:
        """Waits, at most until the batch is stopped. Returns whether it goes on."""
        if seconds > 0 and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stop.wait()
        return not self._stop.is_set()


async def _ended(workers: list[asyncio.Task[None]]) -> None:
    """Returns when all workers have ended. Raises the first error of one."""
    done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    for worker in done:
        if not worker.cancelled():
            worker.result()
    still = [worker for worker in workers if not worker.done()]
    if still:
        await _ended(still)
