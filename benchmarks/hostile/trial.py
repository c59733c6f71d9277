"""One trial: a fresh stack, well-behaved clients beside the victim, then attackers in their place."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.hostile.attacker import start_all
from benchmarks.hostile.attacks import BY_NAME, ORDINARY, Attack, Target
from benchmarks.hostile.goals import judged
from benchmarks.hostile.memory import Memory
from benchmarks.hostile.victim import NUM_STREAMS, Victim
from benchmarks.serving.idle import running
from benchmarks.side_by_side.cores import CoreTimes
from twinfang.launch import LaunchedStack

MAX_PEERS = 64 - NUM_STREAMS
"""Together with the victim's streams, as many as a decode server has rows."""
WARM_UP_S = 5.0
SETTLE_S = 2.0
MARGIN_S = 30.0
"""Time after which attackers end by themselves if they were not told to."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of a trial."""

    stretch_s: float
    """Length of the baseline, and of the attack."""
    rest_s: float
    """Time from the attack's end until memory is measured again."""
    as_long: bool = False
    """Whether well-behaved clients ask for answers as long as the attackers' answers."""
    one_address: bool = False
    """Whether attackers use the victim's address, so that the router can't distinguish them."""


def measure(name: str, attacks: Sequence[Attack], conditions: Conditions) -> dict[str, Any]:
    """Measures one trial on a fresh stack with a store of responses, so that no attack is affected by an
    earlier one."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(("--response-store", f"{folder}/responses")) as stack,
    ):
        return asyncio.run(_measure(name, attacks, conditions, stack))


def peers_of(attacks: Sequence[Attack], *, as_long: bool = False) -> list[tuple[str, int]]:
    """Returns name and number of the clients in each attack's place: in total as many as there are rows
    for."""
    total = sum(attack.num_peers for attack in attacks)
    peers = []
    for attack in attacks:
        peer = BY_NAME[attack.as_long if as_long else ORDINARY.name]
        count = max(1, attack.num_peers * min(MAX_PEERS, total) // total)
        peers.append((peer.name, count if peer is ORDINARY else attack.num_clients))
    return peers


async def _measure(
    name: str, attacks: Sequence[Attack], conditions: Conditions, stack: LaunchedStack
) -> dict[str, Any]:
    target = Target(stack.url.removeprefix("http://"), stack.model)
    victim, memory = Victim(target), Memory(stack)
    peers = peers_of(attacks, as_long=conditions.as_long)
    fresh = memory.now()
    with victim.running():
        baseline = await _beside(victim, peers, target, conditions, stack, warm_up_s=WARM_UP_S)
        await asyncio.sleep(SETTLE_S)
        before = memory.now()
        with memory.watched():
            hostile = [(attack.name, attack.num_clients) for attack in attacks]
            attacked = await _beside(victim, hostile, target, conditions, stack)
            afterwards = await victim.stretch(SETTLE_S)
    await asyncio.sleep(conditions.rest_s)
    found = {
        "attack": name,
        "does": "; ".join(attack.does for attack in attacks),
        "num_peers": sum(count for _, count in peers),
        "baseline": baseline,
        "attacked": attacked,
        "just_after": afterwards,
        "memory_mib": {"fresh": fresh, "before": before, "peak": memory.peak, "after": memory.now()},
        "restarts": {name: one.restarts for name, one in stack.processes().items()},
        "load_average": os.getloadavg()[0],
    }
    return found | {"goals": judged(found)}


async def _beside(
    victim: Victim,
    clients: Sequence[tuple[str, int]],
    target: Target,
    conditions: Conditions,
    stack: LaunchedStack,
    *,
    warm_up_s: float = 0.0,
) -> dict[str, Any]:
    """Measures the victim beside these clients, and their own results."""
    seconds = conditions.stretch_s
    limit_s = warm_up_s + seconds + MARGIN_S
    attackers = await asyncio.to_thread(
        start_all, clients, target, limit_s, one_address=conditions.one_address
    )
    if warm_up_s:
        await asyncio.sleep(warm_up_s)
    cores, began = CoreTimes.now([stack.supervisor.pid]), time.monotonic()
    seen = await victim.stretch(seconds)
    later, duration_s = CoreTimes.now([stack.supervisor.pid]), time.monotonic() - began
    ended = await asyncio.gather(*(asyncio.to_thread(attacker.end) for attacker in attackers))
    tallies = [{"name": attacker.name, **tally} for attacker, tally in zip(attackers, ended, strict=True)]
    figures = cores.figures(later, duration_s, 1)
    attackers_cores = sum(tally["cpu_s"] for tally in ended) / (warm_up_s + seconds)
    shares = {
        "stack": figures["server_cores"],
        "victim": figures["client_cores"],
        "attackers": round(attackers_cores, 2),
        "others": round(max(0.0, figures["other_cores"] - attackers_cores), 2),
    }
    return seen | {"beside": tallies, "cores": shares}
