"""The groups of a server's process: tensor-parallel ranks, ranks that share experts, a lockstep group."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path

from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.model_shard import check_divides
from engine.config import EngineConfig
from engine.group.data_parallel import join_group
from engine.group.mesh import GroupMesh
from engine.group.nodes import join_ranks
from engine.models import read_config
from engine.parallel.tensor_parallel import ALONE, TensorParallel, join, leave

log = logging.getLogger(__name__)

GOODBYE_TIMEOUT_S = 5.0
_OF_ONE_HOST = frozenset(
    {"model_dir", "device", "num_threads", "niceness", "data_parallel", "nodes", "file_cache"}
)
"""Settings that may differ between the hosts of one server."""


@dataclass(frozen=True)
class Membership:
    """One process's place in the groups that it belongs to."""

    tp: TensorParallel = ALONE
    mesh: GroupMesh | None = None
    """Connections of a lockstep group, or of one server's ranks on several hosts; None if there is
    neither."""
    is_lockstep: bool = False

    @classmethod
    def enter(cls, config: EngineConfig, tp_rank: int, meeting_point: Path) -> Membership:
        """Meets the other processes.

        ``meeting_point``: see :func:`engine.parallel.tensor_parallel.join`. Raises what that function and
        :func:`engine.group.meeting.meet` raise.
        """
        device, tp_size = config.resolve_device(tp_rank), config.tensor_parallel
        if config.is_lockstep:
            terms = _terms(config)
            return cls(*join_group(config.data_parallel, tp_rank, tp_size, device, terms=terms), True)
        shares_experts = config.expert_parallel
        if config.nodes.size == 1:
            return cls(join(tp_rank, tp_size, meeting_point, device, shares_experts=shares_experts))
        terms = _terms(config)
        return cls(
            *join_ranks(config.nodes, tp_rank, tp_size, device, shares_experts=shares_experts, terms=terms)
        )

    @property
    def leads(self) -> tuple[int, ...]:
        """For each data-parallel rank, the process that represents it; empty outside a lockstep group."""
        return tuple(range(0, self.mesh.size, self.tp.size)) if self.mesh and self.is_lockstep else ()

    def say_goodbye(self) -> None:
        """Tells the ranks on other hosts that this rank ends on purpose, not because of a failure."""
        if self.mesh is not None and not self.is_lockstep:
            self.mesh.leave()

    def end(self) -> None:
        """Waits for the goodbyes of ranks on other hosts, and disconnects."""
        mesh = self.mesh
        if mesh is None:
            leave()
            return
        self.say_goodbye()
        if not self.is_lockstep and not mesh.wait_until_all_left(GOODBYE_TIMEOUT_S):
            log.warning("not all ranks have said goodbye within %g s", GOODBYE_TIMEOUT_S)
        leave()
        mesh.close()


def check_model(config: EngineConfig) -> None:
    """Raises :class:`ConfigError` if the model can't be divided among the configured ranks."""
    model = read_config(config.model_dir, config.dtype)
    config.check_experts(model)
    check_divides(model, config.tensor_parallel, shares_experts=config.expert_parallel)


def _terms(config: EngineConfig) -> dict[str, str]:
    """Returns the values that must be the same on all processes that meet; the keys name the settings.

    For ranks in lockstep these are the values that determine the number or size of a step's collectives. For
    ranks of one server on several hosts they are nearly all settings, because each rank makes rank 0's
    decisions again by itself.
    """
    device = config.resolve_device(config.nodes.ranks(config.tensor_parallel).start)
    model = read_config(config.model_dir, config.dtype, device, config.weight_dtype)
    terms: dict[str, object] = {
        "the model's fingerprint": fingerprint(
            config.model_dir, model.dtype, config.load_format, weight_dtype=config.weight_dtype
        ),
        "`device`": device.type,
    }
    if config.is_lockstep:
        names = ["tensor_parallel", "role", "max_num_seqs", "num_speculative", "sanitize", "batch_invariant"]
        terms["`data_parallel.size`"] = config.data_parallel.size
        terms["`drafter`"] = config.resolve_drafter(model)
    else:
        names = [field.name for field in fields(config) if field.name not in _OF_ONE_HOST]
        terms["`nodes.size`"] = config.nodes.size
        terms["whether there is a `file_cache_dir`"] = config.file_cache is not None
    terms |= {f"`{name}`": getattr(config, name) for name in names}
    return {name: str(value) for name, value in terms.items()}
