"""How soon requests continue when a server is killed, frozen or drained under load, and whether all answers
are right.

    python -m benchmarks.soak.recovery --json benchmarks/results/recovery.json --write-section

Two prefill servers, two decode servers and a router; 16 clients in a closed loop, with known answers. One
fault at a time strikes while they send requests, and lasts until all disturbed requests are answered; then
the server is healed. Ends with 1 if an answer is wrong or an error, or if something is not given back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.soak.answer import Outcome
from benchmarks.soak.clients import Clients
from benchmarks.soak.lineups import PLAIN
from benchmarks.soak.questions import make_questions
from benchmarks.soak.run import undisturbed, until_idle
from testing.conditions import wait_until
from testing.fleets.fleet import START_DEADLINE_S, Fleet, Process, make_processes, running
from testing.marked_section import replace_between
from testing.repository import DOCS
from twinfang.bench.machine import machine

CONCURRENCY = 16
QUIET_S = 10.0
"""Seconds of load before each fault."""
STRUCK_S = 12.0
"""Least seconds of load after it."""
ROUTER_FLAGS = ("--request-timeout", "90")
ENVIRONMENT = {"TWINFANG_SANITIZE": "1"}
DOCUMENT = DOCS / "reliability.md"
BEGIN = "<!-- written by: python -m benchmarks.soak.recovery --write-section -->"
END = "<!-- end of what the recovery benchmark writes -->"

FAULTS: dict[str, Callable[[Process], object]] = {
    "killed": Process.kill,
    "frozen": Process.freeze,
    "drained (SIGTERM)": Process.stop,
}


@dataclass(frozen=True)
class Recovery:
    """The effects of one fault."""

    fault: str
    server: str
    in_flight: int
    """Requests in flight when the fault struck."""
    right: int
    """Requests among these, and among those sent during the fault, that were answered token for token."""
    not_right: list[str]
    """The results of the others."""
    recovery_s: float
    """Time until the last request in flight was answered."""
    longest_silence_s: float
    """Between two events of one stream."""
    slowest_s: float
    """The longest time of all answers requested during the fault."""
    quiet_slowest_s: float
    """The same before the fault struck."""
    back_in_use_s: float
    """Time from the server's restart or thaw until the router used it again."""
    leaked: dict[str, dict[str, int]]


def measure(folder: Path, say: Callable[[str], None]) -> list[Recovery]:
    """Measures all faults, one after the other."""
    questions = make_questions(0)
    expected = undisturbed(questions, folder)
    names = {"router": tuple(PLAIN.servers)}
    servers, routers = make_processes(
        folder, PLAIN.servers, names, router_flags=ROUTER_FLAGS, environment=ENVIRONMENT
    )
    fleet = Fleet(folder, servers, routers, names)
    found = []
    with running(fleet):
        clients = Clients(
            [routers["router"].url],
            questions,
            expected,
            seed=0,
            concurrency=CONCURRENCY,
            rest_s=0.0,
            cancelled=0.0,
        )
        try:
            for fault in FAULTS:
                for name in PLAIN.servers:
                    found.append(_strike(fleet, clients, fault, fleet[name]))
                    say(str(found[-1]))
        finally:
            clients.close()
    return found


def _strike(fleet: Fleet, clients: Clients, fault: str, server: Process) -> Recovery:
    clients.outcomes = []
    clients.resume()
    time.sleep(QUIET_S)
    struck = time.monotonic()
    FAULTS[fault](server)
    time.sleep(STRUCK_S)
    clients.pause()  # returns when all are answered, the fault still there
    outcomes = clients.outcomes
    healed = time.monotonic()
    server.thaw() if server.is_alive else server.start(fleet.lifeline[0])
    wait_until(lambda: _is_connected(fleet), f"{server.name} is in use again", START_DEADLINE_S)
    back_in_use_s = time.monotonic() - healed
    before = [one for one in outcomes if one.sent + one.seconds < struck]
    disturbed = [one for one in outcomes if one.sent + one.seconds >= struck]
    in_flight = [one for one in disturbed if one.sent < struck]
    return Recovery(
        fault,
        server.name,
        len(in_flight),
        sum(one.verdict == "right" for one in disturbed),
        [f"{one.verdict} {one.code}: {one.detail}" for one in outcomes if one.verdict != "right"],
        max(one.sent + one.seconds for one in in_flight) - struck,
        max(one.longest_silence_s for one in disturbed),
        _slowest(disturbed),
        _slowest(before),
        back_in_use_s,
        until_idle(fleet).leaked,
    )


def _slowest(outcomes: Sequence[Outcome]) -> float:
    return max(one.seconds for one in outcomes)


def _is_connected(fleet: Fleet) -> bool:
    return all(process.is_alive for process in fleet.processes) and fleet.is_connected()


def section(found: Sequence[Recovery], facts: dict[str, object]) -> str:
    """The table of docs/reliability.md."""
    lines = [
        f"{CONCURRENCY} clients, two prefill and two decode servers. "
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load_average']:.1f} before the run.",
        "",
        "| fault | server | in flight | right | not right | all of them answered after "
        "| longest silence in a stream | slowest answer, before → during | in use again |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        lines.append(
            f"| {one.fault} | {one.server} | {one.in_flight} | {one.right} | {len(one.not_right)} "
            f"| {one.recovery_s:.1f} s | {one.longest_silence_s:.1f} s "
            f"| {one.quiet_slowest_s:.1f} → {one.slowest_s:.1f} s | {one.back_in_use_s:.1f} s |"
        )
    for fault in FAULTS:
        of = [one for one in found if one.fault == fault]
        lines += ["", f"{fault}: median {median(one.recovery_s for one in of):.1f} s until all are answered."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures with machine and versions")
    parser.add_argument("--write-section", action="store_true", help="figures into docs/reliability.md")
    options = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="twinfang-recovery-") as folder:
        found = measure(Path(folder), lambda line: print(line, flush=True))
    text = section(found, facts)
    print(text)
    if options.json is not None:
        result = {"machine": facts, "faults": [asdict(one) for one in found]}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.write_section:
        replace_between(DOCUMENT, BEGIN, END, text)
    return 1 if any(one.not_right or one.leaked for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
