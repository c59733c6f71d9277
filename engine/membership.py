"""What a server's process belongs to: tensor-parallel ranks, ranks that share experts, a lockstep group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.data_parallel import join_group
from engine.fingerprint import fingerprint
from engine.group_mesh import GroupMesh
from engine.models import read_config
from engine.tensor_parallel import ALONE, TensorParallel, join, leave


@dataclass(frozen=True)
class Membership:
    """One process' place in all of these."""

    tp: TensorParallel = ALONE
    mesh: GroupMesh | None = None
    """Of a lockstep group."""

    @classmethod
    def enter(cls, config: EngineConfig, tp_rank: int, meeting_point: Path) -> Membership:
        """Meets the others.

        ``meeting_point``: see :func:`engine.tensor_parallel.join`. Raises what that and
        :func:`engine.data_parallel.join_group` raise.
        """
        device, tp_size = config.resolve_device(tp_rank), config.tensor_parallel
        if not config.is_lockstep:
            shares_experts = config.expert_parallel
            return cls(join(tp_rank, tp_size, meeting_point, device, shares_experts=shares_experts))
        return cls(*join_group(config.data_parallel, tp_rank, tp_size, device, terms=_terms(config)))

    @property
    def leads(self) -> tuple[int, ...]:
        """Of each data-parallel rank the process that speaks for it."""
        return () if self.mesh is None else tuple(range(0, self.mesh.size, self.tp.size))

    def end(self) -> None:
        leave()
        if self.mesh is not None:
            self.mesh.close()


def _terms(config: EngineConfig) -> dict[str, str]:
    """What the number of a step's collectives, or their size, follows from, by the flag that sets it."""
    device = config.resolve_device(0)
    model = read_config(config.model_dir, config.dtype, device)
    terms = {
        "the model's fingerprint": fingerprint(config.model_dir, model.dtype, config.load_format),
        "--data-parallel-size": config.data_parallel.size,
        "--tensor-parallel": config.tensor_parallel,
        "--role": config.role,
        "--device": device.type,
        "--max-num-seqs": config.max_num_seqs,
        "--speculative": config.num_speculative,
        "--drafter": config.resolve_drafter(model),
        "--sanitize": config.sanitize,
    }
    return {name: str(value) for name, value in terms.items()}
