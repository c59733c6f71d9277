"""Ctrl-C in a terminal, under load: clients are told, whether it is pressed once or twice.

The terminal sends SIGINT to all processes of its foreground group, as a shell's terminal does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testing.conditions import TIMEOUT_S, until, wait_until
from testing.fleets.fleet import START_DEADLINE_S
from testing.router.scripted_servers import ScriptedDecode, hanging, server_info
from testing.router.tokenizers import write_model_dir
from twinfang.stack.ports import free_ports

CTRL_C = b"\x03"


class Terminal:
    """A command in the foreground of a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._fd, terminal = pty.openpty()
        # Not pty.fork(): gRPC's threads in this process would be in the way of a fork.
        self._process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "twinfang", *arguments],
            **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
        )
        os.close(terminal)
        os.set_blocking(self._fd, False)
        self.shown = ""

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def has_shown(self, text: str) -> bool:
        with contextlib.suppress(BlockingIOError, OSError):
            self.shown += os.read(self._fd, 1 << 20).decode(errors="replace")
        return text in self.shown

    def has_ended(self) -> bool:
        self.has_shown("")  # a full terminal would block the command
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    running = Terminal(*arguments)
    try:
        yield running
    except BaseException as error:
        error.add_note(running.shown[-3000:])
        raise
    finally:
        running.close()


async def events(client: httpx.AsyncClient, begun: asyncio.Event, **body) -> list[str]:
    """The lines of a stream, which must not be cut."""
    lines = []
    async with client.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True} | body
    ) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            begun.set()
            lines += [line] if line else []
    return lines


async def interrupt(running: Terminal, url: str, num_presses: int, num_streams: int, **body) -> None:
    """Press Ctrl-C while streams run, and check that each is told, and that the command ends with 0."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:

        async def is_ready() -> bool:
            assert not running.has_ended(), "the command has ended"
            with contextlib.suppress(httpx.TransportError):
                return (await client.get("/readyz")).status_code == 200
            return False

        await until(is_ready, "the router is ready", timeout_s=START_DEADLINE_S, interval_s=0.05)
        begun = [asyncio.Event() for _ in range(num_streams)]
        streams = [asyncio.create_task(events(client, one, **body)) for one in begun]
        await asyncio.gather(*(asyncio.wait_for(one.wait(), TIMEOUT_S) for one in begun))
        running.press(CTRL_C)
        await until(lambda: running.has_shown("draining: "), "the drain is told")
        if num_presses == 2:
            running.press(CTRL_C)
        for *_, error, done in await asyncio.gather(*streams):
            said = json.loads(error.removeprefix("data: "))["error"]["message"]
            assert said.startswith("this router stopped before the answer was finished")
            assert done == "data: [DONE]"
    await asyncio.to_thread(wait_until, running.has_ended, "the command has ended", TIMEOUT_S)
    assert running.exit_code == 0


@pytest.mark.parametrize(("num_presses", "grace"), [(1, "0.5"), (2, "600")])
async def test_streams_of_a_router_are_told(tmp_path: Path, num_presses: int, grace: str):
    decode = ScriptedDecode(server_info("both"))
    decode.script = hanging
    await decode.start()
    (port,) = free_ports(1)
    folder = write_model_dir(tmp_path)
    (folder / "config.json").write_text("{}")
    flags = (
        "--model",
        f"tiny={folder}",
        "--decode",
        decode.address,
        "--port",
        str(port),
        "--shutdown-grace",
        grace,
    )
    with terminal("router", *flags) as running:
        await interrupt(running, f"http://127.0.0.1:{port}", num_presses, 8, model="tiny")
    await decode.stop()


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["up", "serve"])
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(("num_presses", "grace"), [(1, "0.5"), (2, "600")])
async def test_streams_of_a_stack_are_told(command: str, workers: str, num_presses: int, grace: str):
    (port,) = free_ports(1)
    flags = ("--port", str(port), "--shutdown-grace", grace, "--workers", workers)
    body = {"model": "bundled_model", "max_tokens": 4000, "ignore_eos": True}
    with terminal(command, *flags) as running:
        await interrupt(running, f"http://127.0.0.1:{port}", num_presses, 32, **body)
        assert "was killed" not in running.shown
