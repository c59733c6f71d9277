"""The two pools that hold all KV and all Mamba states, and the views of them that kernels use.

| pool | shape | one unit |
|---|---|---|
| KV | ``[num_blocks, kv_heads, attn_layers, 2, block_size, head_dim]`` | block: one contiguous region |
| state | ``[num_slots, slot_bytes]`` (bytes) | slot: conv and SSM state of all Mamba layers |

Both pools are allocated once, so that they need to be registered for transfers only once. Index 0 of each
pool is the null entry: no request gets it, and padding points at it. A model without attention layers has no
KV, and a model without recurrent layers has no states. The entries of such a pool have zero bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.memory.async_copy import upload
from kernels.cpu.host_memory import host_zeros
from kernels.replay.gated_delta_flush import KeptDeltaInputs
from kernels.replay.selective_state_flush import KeptSsmInputs
from wire.messages.layout import Axis, Layout, Ranges, Segment

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SEGMENT_ALIGNMENT = 256
"""In bytes. Keeps every layer's state aligned for vector loads and for RDMA."""


@dataclass(frozen=True)
class CacheSpec:
    """The data that a model keeps for each token (KV) and for each sequence (state)."""

    attn_layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    mamba_layers: int
    conv_channels: int
    conv_width: int
    """The convolution's width K. The state keeps the last K - 1 inputs."""
    mamba_heads: int
    mamba_head_dim: int
    state_size: int
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype
    stochastic_rounding: bool = False
    """Whether states are rounded stochastically if ``ssm_dtype`` has 16 bits."""
    held_kv_heads: Ranges = ()
    """The model's KV heads that a tensor-parallel rank holds; empty means all. The next two fields are the
    same for channels of the convolution and for Mamba heads."""
    held_conv_channels: Ranges = ()
    held_mamba_heads: Ranges = ()
    copies_kv_heads: bool = False
    """Whether a lower rank holds the same KV heads."""
    copies_groups: bool = False
    """Whether a lower rank holds the same B and C channels (Mamba) or q and k channels (Gated DeltaNet).
    They are all ranges of ``held_conv_channels`` except the first."""

    @property
    def has_kv(self) -> bool:
        """Whether the model stores KV in blocks."""
        return self.attn_layers > 0

    @property
    def has_state(self) -> bool:
        """Whether sequences have a recurrent state."""
        return self.mamba_layers > 0

    def kv_layout(self, num_blocks: int, block_size: int) -> Layout:
        """Lay out a block: ``[kv_heads, attn_layers, 2, block_size, head_dim]``, contiguous."""
        if not self.has_kv:
            return Layout("block", num_blocks, 0, ())
        axes = _dense_axes(
            [
                ("kv_heads", self.kv_heads),
                ("attn_layers", self.attn_layers),
                ("key_or_value", 2),
                ("block_size", block_size),
                ("head_dim", self.head_dim),
            ],
            self.kv_dtype.itemsize,
        )
        segment = Segment("kv", _dtype_name(self.kv_dtype), 0, axes, self.held_kv_heads)
        return Layout("block", num_blocks, segment.num_bytes, (segment,))

    def state_layout(self, num_slots: int) -> Layout:
        """Lay out a slot: for each Mamba layer conv ``[channels, K-1]``, SSM ``[heads, head_dim, state]``."""
        conv_dims = [("channels", self.conv_channels), ("window", self.conv_width - 1)]
        ssm_dims = [
            ("heads", self.mamba_heads),
            ("head_dim", self.mamba_head_dim),
            ("state_size", self.state_size),
        ]
        segments: list[Segment] = []
        offset = 0
        for layer in range(self.mamba_layers):
            for name, dtype, dims, held in (
                ("conv", self.conv_dtype, conv_dims, self.held_conv_channels),
                ("ssm", self.ssm_dtype, ssm_dims, self.held_mamba_heads),
            ):
                axes = _dense_axes(dims, dtype.itemsize)
                segment = Segment(f"{name}.{layer}", _dtype_name(dtype), offset, axes, held)
                segments.append(segment)
                offset = _align(offset + segment.num_bytes)
        return Layout("slot", num_slots, offset, tuple(segments))

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one KV block of ``block_size`` tokens."""
        return self.kv_layout(1, block_size).unit_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one Mamba state."""
        return self.state_layout(1).unit_bytes


@dataclass(frozen=True)
class KeptInputs:
    """What rows that replay keep of a recurrent layer's inputs (:mod:`kernels.replay.kept_inputs`)."""

    conv: torch.Tensor
    """``[N + 1, 2 T, conv_channels]``"""
    scan: KeptSsmInputs | KeptDeltaInputs


@dataclass(frozen=True)
class LayerCaches:
    """Views of the pools, one for each layer: ``i`` counts attention layers, ``j`` recurrent layers.

    ``k[i]``, ``v[i]``: ``[num_blocks, kv_heads, block_size, head_dim]``;
    ``conv[j]``: ``[num_slots, conv_channels, K - 1]``;
    ``ssm[j]``: ``[num_slots, mamba_heads, mamba_head_dim, state_size]``.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    conv: list[torch.Tensor]
    ssm: list[torch.Tensor]
    stochastic_rounding: bool = False
    """Whether ``ssm`` is rounded stochastically if it is stored in 16 bits."""
    kept: list[KeptInputs] = field(default_factory=list)
    """One for each recurrent layer if decode rows replay, else none."""


class Caches:
    """Owns the memory of both pools. It does not know which blocks and slots are in use."""

    def __init__(
        self, spec: CacheSpec, *, num_blocks: int, num_slots: int, block_size: int, device: torch.device | str
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        self.kv_layout = spec.kv_layout(num_blocks, block_size)
        self.state_layout = spec.state_layout(num_slots)
        kv_shape = num_blocks, spec.kv_heads, spec.attn_layers, 2, block_size, spec.head_dim
        self.kv = _zeros(kv_shape, spec.kv_dtype, device)
        self.state = _zeros((num_slots, self.state_layout.unit_bytes), torch.uint8, device)
        self.kv_words = self.kv.view(_WORDS[spec.kv_dtype.itemsize])
        """The KV pool's bits as integers, to move, sum or fill them. Few operations support float8."""
        self.layers = LayerCaches(
            k=[self.kv[:, :, layer, 0] for layer in range(spec.attn_layers)],
            v=[self.kv[:, :, layer, 1] for layer in range(spec.attn_layers)],
            conv=self._state_views("conv", spec.conv_dtype),
            ssm=self._state_views("ssm", spec.ssm_dtype),
            stochastic_rounding=spec.stochastic_rounding,
        )

    @property
    def device(self) -> torch.device:
        """Device of both pools."""
        return self.state.device

    @property
    def num_blocks(self) -> int:
        return self.kv_layout.num_units

    @property
    def num_slots(self) -> int:
        return self.state_layout.num_units

    def read_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of the blocks' bits on the device, as integers ``[n, ...]``."""
        return self.kv_words.index_select(0, self._index(block_ids))

    def write_blocks(self, block_ids: Sequence[int], blocks: torch.Tensor) -> None:
        """Overwrite the blocks with the bits of ``blocks``, which are on the device."""
        words = blocks.view(-1).view(self.kv_words.dtype).view(len(block_ids), *self.kv_words.shape[1:])
        self.kv_words.index_copy_(0, self._index(block_ids), words)

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return upload(np.array(block_ids, dtype=np.int64), self.device)

    def _state_views(self, kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
        typed = self.state.view(-1).view(dtype)
        slot_stride = self.state_layout.unit_bytes // dtype.itemsize
        views = []
        for segment in self.state_layout.segments:
            if segment.name.split(".")[0] == kind:
                sizes = [self.num_slots, *(axis.size for axis in segment.axes)]
                strides = [slot_stride, *(axis.stride // dtype.itemsize for axis in segment.axes)]
                views.append(typed[segment.offset // dtype.itemsize :].as_strided(sizes, strides))
        return views


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type == "cpu":
        return host_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _dense_axes(dims: list[tuple[str, int]], itemsize: int) -> tuple[Axis, ...]:
    axes: list[Axis] = []
    stride = itemsize
    for name, size in reversed(dims):
        axes.append(Axis(name, size, stride))
        stride *= size
    return tuple(reversed(axes))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _align(num_bytes: int) -> int:
    return -(-num_bytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
