"""``twinfang batch``: checks the files, finds or starts an endpoint, runs the job, says how it ended."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinfang.batch.answer_files import AnswerFiles
from twinfang.batch.input_file import CheckedInput, check_input
from twinfang.batch.job import Job, JobSettings
from twinfang.batch.progress import Progress
from twinfang.batch.unfinished import UnfinishedError
from twinfang.endpoint.endpoint import Endpoint, endpoint_of
from twinfang.endpoint.model_list import EndpointError, model_list
from twinfang.stack.own_stack import OwnStack
from wire.errors import ConfigError

LOW_PRIORITY = 100
"""Ordinary requests have 0, and lower numbers go first."""
REMOTE_CONCURRENCY = 64
MAX_CONCURRENCY = 1024
MAX_SHOWN_MODELS = 5


@dataclass(frozen=True)
class _Paths:
    input: Path
    output: Path
    errors: Path


def prepare(values: argparse.Namespace, own_stack: Callable[[], OwnStack]) -> Callable[[], None]:
    """Prepares the command. ``own_stack`` plans a stack if there is no --base-url. Raises
    :class:`ConfigError` if a file is missing or a file's name is used twice."""
    paths = _paths(values)
    if values.base_url is not None:
        endpoint = endpoint_of(values, os.environ)
        return lambda: asyncio.run(_run(paths, values, None, endpoint))
    stack = own_stack()
    return lambda: asyncio.run(_run(paths, values, stack, Endpoint(f"{stack.url}/v1", values.timeout)))


def _paths(values: argparse.Namespace) -> _Paths:
    if values.input is None or values.output is None:
        raise ConfigError(
            "what is to be answered, and where to? Give both: twinfang batch IN.jsonl --output OUT.jsonl"
        )
    output: Path = values.output.resolve()
    errors: Path = (values.errors or output.with_name(f"{output.stem}.errors{output.suffix}")).resolve()
    for name, path in (("--output", output), ("--errors", errors)):
        if path.exists() and path.samefile(values.input):
            raise ConfigError(f"{name} {path} is the input: give another file")
    return _Paths(values.input.resolve(), output, errors)


async def _run(paths: _Paths, values: argparse.Namespace, stack: OwnStack | None, endpoint: Endpoint) -> None:
    checked = check_input(paths.input)
    files = AnswerFiles(paths.output, paths.errors, checked)
    try:
        if files.num_done < checked.num_requests:
            await _work(checked, files, values, stack, endpoint)
        _say_end(checked, files, paths)
    finally:
        files.close()


async def _work(
    checked: CheckedInput,
    files: AnswerFiles,
    values: argparse.Namespace,
    stack: OwnStack | None,
    endpoint: Endpoint,
) -> None:
    """Answers what has no answer yet. Raises :class:`UnfinishedError` if some lines still have none."""
    stopped = asyncio.Event()
    stop = _Stop(stopped)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, stop.request)
    if stack is None:
        await _answer(checked, files, values, endpoint, REMOTE_CONCURRENCY, stop)
    else:
        _require_models(checked, stack.model_names)
        _say(f"starting {stack.description}")
        rows = int(1.5 * stack.num_rows)
        async with stack.running(stopped) as is_ready:
            if is_ready:
                work = _answer(checked, files, values, endpoint, min(rows, MAX_CONCURRENCY), stop)
                await stack.unless_it_fails(work)
    num_left = checked.num_requests - files.num_done
    if num_left:
        raise UnfinishedError(f"stopped; {_left(num_left, checked)}")


class _Stop:
    """Signals, before and after there is a job to stop."""

    def __init__(self, stopped: asyncio.Event) -> None:
        self._stopped = stopped
        self._running: tuple[Job, Progress] | None = None

    def request(self) -> None:
        """Stops what runs: the job if there is one, else the start of a stack."""
        if self._running is not None:
            job, progress = self._running
            if not self._stopped.is_set():
                progress.say("stopping when the running answers are complete; Ctrl-C once more ends them")
            job.request_stop()
        self._stopped.set()

    def hand_to(self, job: Job, progress: Progress) -> None:
        """Lets signals stop this job, also one that has come already."""
        self._running = job, progress
        if self._stopped.is_set():
            job.request_stop()


async def _answer(
    checked: CheckedInput,
    files: AnswerFiles,
    values: argparse.Namespace,
    endpoint: Endpoint,
    concurrency: int,
    stop: _Stop,
) -> None:
    settings = JobSettings(
        values.concurrency or concurrency,
        values.max_retries,
        values.give_up_after,
        values.stop_grace,
        await asyncio.to_thread(_priority, values, endpoint, checked),
    )
    progress = Progress(checked.num_requests, files.num_answers, files.num_errors)
    job = Job(checked, files, endpoint, settings, progress)
    stop.hand_to(job, progress)
    progress.start()
    try:
        await job.run()
    except UnfinishedError as error:
        num_left = checked.num_requests - files.num_done
        raise UnfinishedError(f"{error.message}; {_left(num_left, checked)}") from error
    finally:
        progress.end()


def _priority(values: argparse.Namespace, endpoint: Endpoint, checked: CheckedInput) -> int | None:
    """Returns the priority that requests get. Raises :class:`EndpointError` if the endpoint can't be reached,
    or lists all its models and lacks one that the input asks for."""
    models = model_list(endpoint)
    if models.is_ours:
        _require_models(checked, models.names)
    if values.priority is not None:
        return int(values.priority)
    return LOW_PRIORITY if models.is_ours else None


def _require_models(checked: CheckedInput, served: tuple[str, ...]) -> None:
    for name, line in checked.models.items():
        if name not in served:
            raise EndpointError(
                f"line {line} of {checked.path} asks for model {name!r}; served are: "
                f"{', '.join(served[:MAX_SHOWN_MODELS])}. Change the input, or let the server have that name "
                f"too: --alias {name}={served[0]}"
            )


def _left(num_left: int, checked: CheckedInput) -> str:
    return (
        f"{num_left:,} of {checked.num_requests:,} lines have no answer yet: run the same command again to "
        "continue"
    )


def _say_end(checked: CheckedInput, files: AnswerFiles, paths: _Paths) -> None:
    _say(f"{files.num_answers:,} answers of {checked.num_requests:,} lines in {paths.output}")
    if files.num_errors:
        _say(
            f"{files.num_errors:,} errors in {paths.errors}; to try these lines again, remove that file and "
            "run the same command again"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
