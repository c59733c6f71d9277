"""A family of models: how its ``config.json`` is read, how its tensors are called and blocks are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.model_config import ModelConfig
from engine.models.block import Block
from engine.models.builder import Builder


@dataclass(frozen=True)
class MtpFamily:
    """Names below ``mtp.`` of a multi-token prediction layer (:mod:`engine.models.mtp`)."""

    embedding_norm: str
    hidden_norm: str
    joined_proj: str
    last_norm: Callable[[ModelConfig], str]
    blocks: Callable[[Builder], Iterable[Block]]


@dataclass(frozen=True)
class Family:
    """One file of :mod:`engine.models.families` defines one, as ``FAMILY``."""

    architectures: tuple[str, ...]
    """Names in ``architectures`` of the ``config.json`` files that it reads."""
    configure: Callable[[CheckpointFields], ModelConfig]
    prefixes: tuple[str, ...]
    """What tensors' names begin with, the published spelling first; those of the next three come behind."""
    embedding: str
    last_norm: str
    blocks: Callable[[Builder], Iterable[Block]]
    mtp: MtpFamily | None = None
