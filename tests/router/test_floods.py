"""A real router with few file descriptors, flooded from one address without a key: others are served."""

import asyncio
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest

from testing.conditions import TIMEOUT_S
from testing.router.tokenizers import write_model_dir
from twinfang.stack.ports import free_ports

ATTACKER, VICTIM = "127.0.0.2", "127.0.0.1"
MAX_FILES = 512
NUM_SILENT = 600
NUM_SCRAPERS = 100
NUM_ANSWERS = 1000


def request(path: str, head: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path.encode(), head)


class Router:
    def __init__(self, port: int, log) -> None:
        self.port, self.log = port, log

    async def connect(self, source: str):
        return await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0)), TIMEOUT_S
        )

    async def get(self, path: str) -> bytes:
        reader, writer = await self.connect(VICTIM)
        writer.write(request(path, b"Connection: close\r\n"))
        try:
            return await asyncio.wait_for(reader.read(), TIMEOUT_S)
        finally:
            writer.close()


@contextmanager
def file_limit(number: int):
    """Lets children begin with a soft limit of half the ``number``, and a hard limit of it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number // 2, number))

    yield limit
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flooded")
    model = write_model_dir(folder / "model")
    (model / "config.json").write_text("{}")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "twinfang", "router", "--model", str(model), "--port", str(port)]
    command += ["--decode", "127.0.0.1:1"]
    log = folder / "log"
    with log.open("wb") as file, file_limit(MAX_FILES) as limit:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=limit)
        try:
            yield Router(port, log)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
async def ready(router) -> Router:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                if (await router.get("/healthz")).startswith(b"HTTP/1.1 200"):
                    return router
            except OSError:
                await asyncio.sleep(0.05)


async def test_idle_connections_of_one_address_keep_nobody_out(ready):
    """Some have said nothing; some had an answer and keep their connection."""
    idle = []
    for number in range(NUM_SILENT):
        reader, writer = await ready.connect(ATTACKER)
        if number % 2:
            writer.write(request("/version"))
        idle.append((reader, writer))
    for _ in range(20):
        assert (await ready.get("/healthz")).startswith(b"HTTP/1.1 200")
    page = (await ready.get("/metrics")).decode()
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("twinfang_"))
    assert float(figures["twinfang_open_connections"]) <= MAX_FILES / 2
    assert float(figures["twinfang_dropped_connections_total"]) >= NUM_SILENT - MAX_FILES / 2
    assert f"closed a connection of {ATTACKER}" in ready.log.read_text()
    assert "Too many open files" not in ready.log.read_text()
    for _, writer in idle:
        writer.close()


async def test_a_flood_of_scrapes_shares_its_pages(ready):
    """Pages are told apart by their content: each counts the processor's time and the loop's lag."""
    pages, num_answers, is_over = set(), 0, asyncio.Event()

    async def scrape() -> None:
        nonlocal num_answers
        reader, writer = await ready.connect(ATTACKER)
        while not is_over.is_set():
            writer.write(request("/metrics"))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(None, 1)[0])
            pages.add(await reader.readexactly(length))
            num_answers += 1
            if num_answers >= NUM_ANSWERS:
                is_over.set()
        writer.close()

    scrapers = [asyncio.create_task(scrape()) for _ in range(NUM_SCRAPERS)]
    healthy = 0
    async with asyncio.timeout(TIMEOUT_S):
        while not is_over.is_set():
            assert (await ready.get("/healthz")).startswith(b"HTTP/1.1 200")
            healthy += 1
        await asyncio.gather(*scrapers)
    assert healthy >= 5
    assert len(pages) <= NUM_ANSWERS / 10
