"""A prefill server is frozen, killed or restarted while another one reads a cached prompt from it."""

import signal
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.fleets import slowed
from testing.fleets.clients import greedy_body
from testing.fleets.fleet import START_DEADLINE_S
from testing.fleets.neighbours import FLAGS, NAMES, ask, ask_and_publish, failures, figure, prompts_of
from testing.fleets.stack import running_stack

LENDER, READER = NAMES
SOON_S = 12.0
"""A read is given up after two seconds, far sooner than `--neighbour-wait` says."""


@pytest.fixture(scope="module")
def running():
    """Without CMA a lender takes part in each read, as between hosts: a frozen one stops it halfway."""
    environment = {"UCX_TLS": "^cma"}
    with running_stack("up", *FLAGS, environment=environment, module=slowed.MODULE) as stack:
        yield stack


@pytest.fixture
def stack(running):
    """After a test the lender runs, and the reader has been restarted: it leaves no server alone."""
    yield running
    running.kill(LENDER, signal.SIGCONT)
    pid = running.kill(READER)
    running.wait_until(lambda: running.has_restarted(READER, pid), "the reader is back", START_DEADLINE_S)


@pytest.fixture
def published(stack, request):
    """A request whose prompt the lender has cached, and its answer."""
    (prompt,) = prompts_of(1, seed=zlib.crc32(request.node.name.encode()))
    body = greedy_body(prompt, 8)
    return body, ask_and_publish(stack, body, LENDER)[1]


def exact(stack, body, expected):
    began_s = time.monotonic()
    cached, tokens = ask(stack, body, READER)
    assert tokens == expected
    assert time.monotonic() - began_s < SOON_S
    return cached


def in_mid_read(stack, body, disturb):
    """Disturbs the lender after it has lent a start and before the start is read. Returns the answer."""
    lent = figure(stack, LENDER, "lent_prefixes_total")
    with ThreadPoolExecutor(1) as pool:
        with stack.fault("late-neighbour"):
            asked = pool.submit(ask, stack, body, READER)
            stack.wait_until(lambda: figure(stack, LENDER, "lent_prefixes_total") > lent, "a start is lent")
            disturb()
        return asked.result()


@pytest.mark.exhaustive
def test_a_neighbour_frozen_before_it_is_asked(stack, published):
    body, expected = published
    stack.kill(LENDER, signal.SIGSTOP)
    assert exact(stack, body, expected) == 0
    assert sum(failures(stack, READER).values()) == 1
    assert failures(stack, READER).keys() <= {"late", "lost"}
    stack.kill(LENDER, signal.SIGCONT)
    stack.wait_until(stack.is_idle, "nothing is held")


@pytest.mark.exhaustive
def test_a_neighbour_frozen_in_mid_read(stack, published):
    body, expected = published
    assert in_mid_read(stack, body, lambda: stack.kill(LENDER, signal.SIGSTOP)) == (0, expected)
    assert failures(stack, READER) == {"late": 1}
    assert exact(stack, body, expected) == 192, "it has computed it"
    stack.kill(LENDER, signal.SIGCONT)
    stack.wait_until(stack.is_idle, "nothing is held, and the loan has ended")
    assert figure(stack, LENDER, "lent_now_bytes") == 0


@pytest.mark.exhaustive
def test_a_neighbour_killed_in_mid_read(stack, published):
    body, expected = published
    pid = stack.processes()[LENDER].pid
    assert in_mid_read(stack, body, lambda: stack.kill(LENDER)) == (0, expected)
    assert failures(stack, READER) == {"lost": 1}
    stack.wait_until(lambda: stack.has_restarted(LENDER, pid), "the lender is back", START_DEADLINE_S)
    assert exact(stack, body, expected) == 192
    stack.wait_until(stack.is_idle, "nothing is held")


@pytest.mark.exhaustive
def test_a_neighbour_restarted_in_mid_read(stack, published):
    """Its successor has another incarnation, and other memory at the same addresses perhaps."""
    body, expected = published
    pid = stack.processes()[LENDER].pid

    def restart():
        stack.kill(LENDER)
        stack.wait_until(lambda: stack.has_restarted(LENDER, pid), "the lender is back", START_DEADLINE_S)

    assert in_mid_read(stack, body, restart) == (0, expected)
    assert failures(stack, READER).keys() <= {"lost", "late"}
    stack.wait_until(stack.is_idle, "nothing is held")


@pytest.mark.exhaustive
def test_a_reader_killed_in_mid_read_keeps_nothing_for_long(stack, published):
    body, expected = published
    pid = stack.processes()[READER].pid

    def kill():
        assert figure(stack, LENDER, "lent_now_bytes") > 0
        stack.kill(READER)

    assert in_mid_read(stack, body, kill)[1] == expected
    stack.wait_until(lambda: stack.has_restarted(READER, pid), "the reader is back", START_DEADLINE_S)
    stack.wait_until(
        lambda: figure(stack, LENDER, "lent_now_bytes") == 0, "the loan has ended by its deadline"
    )
    stack.wait_until(stack.is_idle, "nothing is held")
