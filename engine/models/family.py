"""A family of models: how to read its ``config.json``, how its tensors are named, how to build its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.model_config import ModelConfig
from engine.models.block import Block
from engine.models.builder import Builder


@dataclass(frozen=True)
class MtpFamily:
    """Tensor names, below ``mtp.``, of a multi-token prediction layer (:mod:`engine.models.mtp`)."""

    embedding_norm: str
    hidden_norm: str
    joined_proj: str
    last_norm: Callable[[ModelConfig], str]
    blocks: Callable[[Builder], Iterable[Block]]


@dataclass(frozen=True)
class Family:
    """A family. Each file of :mod:`engine.models.families` defines one as ``FAMILY``."""

    architectures: tuple[str, ...]
    """Names in ``architectures`` of the ``config.json`` files that this family reads."""
    configure: Callable[[CheckpointFields], ModelConfig]
    prefixes: tuple[str, ...]
    """Possible prefixes of tensor names, the published spelling first. ``embedding``, ``last_norm`` and
    ``blocks`` use names without the prefix."""
    embedding: str
    last_norm: str
    blocks: Callable[[Builder], Iterable[Block]]
    mtp: MtpFamily | None = None
