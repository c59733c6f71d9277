"""A process that runs all clients of one attack.

It prints ``ready`` when it can begin, and begins when it gets a line. It ends when its standard input ends or
after ``--seconds``, and then prints its tally as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.hostile.attacks import BY_NAME, Attack, Tally, Target

RETRY_S = 0.25
"""Pause before a client whose connection broke or was refused tries again."""
END_TIMEOUT_S = 20.0


async def run_attack(clients: Sequence[Client], seconds: float) -> None:
    """Runs all clients until standard input ends or the time is over."""
    tasks = [asyncio.create_task(client.attack_for_ever()) for client in clients]
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), told_to_end.set)
    with suppress(TimeoutError):
        await asyncio.wait_for(told_to_end.wait(), seconds)
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    for task in tasks:
        task.cancel()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(end, Exception):
            raise end


class Client:
    """One client of an attack; its first requests are built when it is made."""

    def __init__(self, attack: Attack, target: Target, number: int, tally: Tally) -> None:
        self._attack, self._target, self._number, self._tally = attack, target, number, tally
        self._rounds = attack.rounds(target, number, tally)

    async def attack_for_ever(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await anext(self._rounds)
            except (OSError, ValueError, IndexError):
                self._tally.counts["broken"] += 1
                self._rounds = self._attack.rounds(self._target, self._number, self._tally)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(max(0.0, began + self._attack.every_s - time.monotonic()))


@dataclass(frozen=True)
class Attacker:
    """The attacking process, as the measuring process sees it."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, name: str, target: Target, num_clients: int, seconds: float) -> Attacker:
        """Starts the process and does not wait. It attacks from ``target.source``, for ``seconds`` at
        most."""
        command = [sys.executable, "-m", "benchmarks.hostile.attacker", "--attack", name]
        command += ["--address", target.address, "--model", target.model, "--source", target.source]
        command += ["--clients", str(num_clients), "--seconds", str(seconds)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return cls(name, process)

    def begin(self) -> None:
        """Waits until the process is ready, then begins. Raises :class:`RuntimeError` if it does not get
        ready."""
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the attacker {self.name} did not start")
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Ends the attack and returns its tally. Raises :class:`subprocess.TimeoutExpired`."""
        try:
            text, _ = self.process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        tally: dict[str, Any] = json.loads(text)
        return tally


def start_all(
    attacks: Sequence[tuple[str, int]], target: Target, seconds: float, *, one_address: bool
) -> list[Attacker]:
    """Starts the given number of clients of each attack. When this returns, all of them attack.

    Each attack comes from its own address, and none from the victim's, 127.0.0.1, unless ``one_address`` is
    set.
    """
    attackers = []
    for number, (name, count) in enumerate(attacks):
        source = "" if one_address else f"127.0.1.{number + 1}"
        attackers.append(Attacker.start(name, replace(target, source=source), count, seconds))
    for attacker in attackers:
        attacker.begin()
    return attackers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attack", choices=list(BY_NAME), required=True)
    parser.add_argument("--address", required=True, help="of the router, 127.0.0.1:PORT")
    parser.add_argument("--model", required=True)
    parser.add_argument("--source", default="", help="address that requests come from")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    target, tally = Target(options.address, options.model, options.source), Tally()
    clients = [Client(BY_NAME[options.attack], target, number, tally) for number in range(options.clients)]
    print("ready", flush=True)
    sys.stdin.readline()
    cpu_s = time.process_time()
    asyncio.run(run_attack(clients, options.seconds))
    report = {
        "answers": dict(sorted(tally.counts.items())),
        "longest_s": round(tally.longest_s, 3),
        "bytes_read": tally.bytes_read,
        "admitted": sorted(tally.noted),
        "cpu_s": round(time.process_time() - cpu_s, 2),
    }
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
