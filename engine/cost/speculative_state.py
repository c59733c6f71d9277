"""Where decode rows with drafts keep their recurrent states: the bytes of both forms, and the choice
(docs/decisions/007-speculative-state.md).

*Slots*: a slot for the state after every position. *Replay*: one slot, and the inputs of the last step, which
the next step repeats as far as they were accepted. Bytes of a row of ``T = 1 + k`` positions in each
recurrent layer:

| form | moved in a step | held |
|---|---|---|
| slots | ``(1 + T) (S + W)`` | ``T (S + W)`` |
| replay | ``2 (S + W) + (a + T) I + T C`` | ``S + W + 2 T (I + C)`` |

``S`` is the scan's state; ``I`` what is kept of a token for the scan; ``C`` a token's inputs of the
convolution; ``W`` the convolution's state, its last K - 1 inputs; ``a``, at most T, the tokens that the step
before gained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.checkpoint.model_config import ModelConfig
from wire.errors import ConfigError

SpeculativeState = Literal["auto", "slots", "replay"]

MOST_OF_SLOTS = 0.45
"""``auto`` replays where this moves at most this part of the bytes that slots move, if all drafts are
accepted: with float32 states and three drafts 0.41, with two 0.51. A replay also computes up to T tokens
again. On an H200, for three drafts and 64 rows, a Mamba layer's update took 0.61 of the time of slots if none
was accepted and 0.75 if all were, one of Gated DeltaNet 0.80 and 0.99."""
FEWEST_ROWS = 8
"""``auto`` replays on servers of at least so many rows. With 8 rows, states take 18 % of a measured step;
with one row 4 %."""


@dataclass(frozen=True)
class StateBytes:
    """Sizes of one rank's recurrent layers, in bytes; the names are those of the module's table."""

    num_layers: int
    scan: int
    """S"""
    window: int
    """W"""
    kept: int
    """I"""
    kept_by_conv: int
    """C"""

    @classmethod
    def of(cls, model: ModelConfig, device_type: str) -> StateBytes | None:
        """Return the sizes of a rank's share of a model; None if it has no recurrent layers."""
        layer = model.recurrent
        if layer is None:
            return None
        itemsize = model.dtype.itemsize
        kept_itemsize = max(4, itemsize) if device_type == "cpu" else itemsize  # CPU kernels keep float32
        spec = model.cache_spec()
        return cls(
            num_layers=spec.mamba_layers,
            scan=math.prod(layer.state_shape) * spec.ssm_dtype.itemsize,
            window=(layer.conv_width - 1) * layer.conv_channels * itemsize,
            kept=layer.kept_bytes(kept_itemsize),
            kept_by_conv=layer.conv_channels * kept_itemsize,
        )

    def moved_by_slots(self, num_positions: int) -> int:
        """Return the state bytes that a row moves in a step."""
        return self.num_layers * (1 + num_positions) * (self.scan + self.window)

    def moved_by_replay(self, num_positions: int, num_accepted: float) -> float:
        """Return the same, if the step before gained ``num_accepted`` tokens on average."""
        inputs = (num_accepted + num_positions) * self.kept + num_positions * self.kept_by_conv
        return self.num_layers * (2 * (self.scan + self.window) + inputs)

    @property
    def kept_token_bytes(self) -> int:
        """Bytes that a replay keeps of one token."""
        return self.num_layers * (self.kept + self.kept_by_conv)


class StateSettings(Protocol):
    """The settings that decide, of :class:`engine.config.EngineConfig`."""

    @property
    def speculative_state(self) -> SpeculativeState: ...
    @property
    def num_speculative(self) -> int: ...
    @property
    def num_positions(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def sanitize(self) -> bool: ...


def check_speculative_state(settings: StateSettings) -> None:
    """Raise :class:`ConfigError` if replays are asked for together with what they don't support."""
    if settings.speculative_state != "replay":
        return
    if settings.num_speculative == 0:
        raise ConfigError(
            "`speculative_state` replay means nothing with `num_speculative` 0: without drafts a row has one "
            "state anyway; leave it out, or raise `num_speculative`"
        )
    if settings.tensor_parallel > 1:
        raise ConfigError(
            f"`speculative_state` replay and `tensor_parallel` {settings.tensor_parallel} exclude each "
            "other: ranks would not wait for each other before another server reads a state; choose slots"
        )
    if settings.sanitize:
        raise ConfigError(
            "`speculative_state` replay and `sanitize` exclude each other: the sanitizer knows only states "
            "that are complete after every step; choose slots, or leave out `sanitize`"
        )


def kept_token_bytes(settings: StateSettings, model: ModelConfig, device_type: str) -> int:
    """Return the bytes that decode rows keep of a token to replay it, in all layers; 0: they have slots.

    ``model`` has the sizes of one rank. Raises :class:`ConfigError` if replays are asked for and the model
    has no recurrent layers.
    """
    sizes = StateBytes.of(model, device_type)
    if sizes is None and settings.speculative_state == "replay":
        raise ConfigError(
            "`speculative_state` replay means nothing for a model without recurrent layers; leave it out"
        )
    if sizes is None or settings.num_positions == 1 or settings.speculative_state == "slots":
        return 0
    if settings.speculative_state == "auto" and not _pays(settings, model, sizes, device_type):
        return 0
    return sizes.kept_token_bytes


def _pays(settings: StateSettings, model: ModelConfig, sizes: StateBytes, device_type: str) -> bool:
    """Return whether ``auto`` replays."""
    if device_type == "cpu" or settings.sanitize or settings.tensor_parallel > 1:
        return False
    # Stochastic rounding would be computed again for every repeated token, which may take more time than
    # the bytes save.
    if settings.max_num_seqs < FEWEST_ROWS or model.cache_formats.stochastic_rounding:
        return False
    num_positions = settings.num_positions
    moved = sizes.moved_by_replay(num_positions, num_accepted=num_positions)
    return moved <= MOST_OF_SLOTS * sizes.moved_by_slots(num_positions)
