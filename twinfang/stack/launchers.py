"""Reads the environment variables that launchers of several processes set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wire.errors import ConfigError

LEADER_PORT = 8290
"""The port at which a group meets. LeaderWorkerSet sets only the leader's name."""


@dataclass(frozen=True)
class LeaderWorkerSet:
    """One pod of a LeaderWorkerSet's group (https://lws.sigs.k8s.io)."""

    index: int
    num_pods: int
    leader: str

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> LeaderWorkerSet | None:
        """Returns the pod that the variables describe; None if this process is not in a LeaderWorkerSet.

        Raises :class:`ConfigError` if a variable is not a number.
        """
        if not environment.get("LWS_WORKER_INDEX"):
            return None
        index, num_pods = (_integer(environment, name) for name in ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"))
        return cls(index, num_pods, environment.get("LWS_LEADER_ADDRESS", ""))

    def address(self, flag: str) -> str:
        """Returns the address at which the group meets. Raises :class:`ConfigError` that names ``flag`` if
        the address is unknown."""
        if not self.leader:
            raise ConfigError(f"LWS_WORKER_INDEX is set and LWS_LEADER_ADDRESS is not: give {flag} HOST:PORT")
        return f"{self.leader}:{LEADER_PORT}"


@dataclass(frozen=True)
class Torchrun:
    """One process of torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html)."""

    rank: int
    world_size: int
    local_rank: int
    master: str
    """``host:port`` of torchrun's store; empty if torchrun does not set it."""
    has_store: bool
    """Whether the launcher's agent has opened the store at ``master``."""
    life: str
    """Distinguishes this start from other starts in the launcher's store, which outlives each start."""

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Torchrun | None:
        """Returns the process that the variables describe; None if torchrun did not start this process.

        Raises :class:`ConfigError` if a variable is not a number.
        """
        if not environment.get("RANK"):
            return None
        rank, world_size, local_rank = (
            _integer(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        host = environment.get("MASTER_ADDR")
        port = _integer(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else None
        has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        life = "/".join(environment.get(name, "") for name in names) if has_store else ""
        master = f"{host}:{port}" if host and port else ""
        return cls(rank, world_size, local_rank, master, has_store, life)

    def address(self, flag: str) -> str:
        """Returns the store's address. Raises :class:`ConfigError` that names ``flag`` if it is unknown."""
        if not self.master:
            raise ConfigError(f"RANK is set, MASTER_ADDR or MASTER_PORT is not: give {flag}")
        return self.master


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r}; expected a number, as the launcher sets it")
    return int(text)
