"""Random weights made on the device, for a directory that holds a ``config.json`` and no weights.

They serve to measure a model's speed without its checkpoint, and to try a set-up before a download. Every
value depends only on the tensor's name, its shape and the value's place in the tensor. Every operation is
exact or rounds its result once. So all devices and releases of torch make the same model, and the order of
loading doesn't matter. The parts that several ranks have make the same model that a single rank would have.

    bits  = mix(place ^ key)            32 bits; key = BLAKE2b(name, shape, chunk)
    value = middle + half_width * u     u in (-1, 1), uniform: from the upper 24 bits

``mix`` is lowbias32 (https://nullprogram.com/blog/2018/07/31/). The widths are chosen so that at any depth
each layer's output is about as large as its input, and logits differ by a few units.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.made_weights import MadeWeights
from engine.checkpoint.model_config import ModelConfig
from kernels.linear.quantized_weight import QuantizedWeight

CHUNK = 1 << 20
"""Number of values that share a key. These 4 MB stay in a GPU's cache while they are mixed."""
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Shift and factor of each round. Torch's integers are signed."""
_LAST_SHIFT = 16
LARGEST_FP8, LARGEST_INT8 = 448.0, 127.0


@dataclass(frozen=True)
class Spread:
    """A uniform distribution within ``half_width`` of ``middle``."""

    half_width: float
    middle: float = 0.0

    @classmethod
    def deviating(cls, deviation: float, middle: float = 0.0) -> Spread:
        """Return a spread with this standard deviation."""
        return cls(math.sqrt(3) * deviation, middle)

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Spread:
        """Return the spread for a tensor. Its published name shows its role in the model."""
        kind = name.rsplit(".", 1)[-1]
        if kind == "A_log":  # decays from almost none to almost all
            return cls(1.5, 0.5)
        if kind == "dt_bias":
            return cls.deviating(1.0, -2.0)
        if kind in ("D", "bias", "e_score_correction_bias"):
            return cls.deviating(0.2)
        if "norm" in name:
            return cls.deviating(0.2, 1.0)
        if "embed" in name:
            return cls.deviating(1.0)
        if "conv1d" in name:
            return cls.deviating(0.5)
        if name.startswith("lm_head"):
            return cls.deviating(4.0 / math.sqrt(shape[-1]))
        # Projections: gain 1, or gain 2 where relu^2 or softmax flattens the result.
        gain = (
            2.0 if any(part in name for part in ("down_proj", "q_proj", "k_proj", "output_linear")) else 1.0
        )
        return cls.deviating(gain / math.sqrt(shape[-1]))


def dummy_weights(
    directory: str | Path,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    batch_invariant: bool = False,
) -> MadeWeights:
    """Make a random tensor for every tensor that the model takes."""
    return MadeWeights(directory, config, device, DummyValues(device), batch_invariant=batch_invariant)


class DummyValues:
    """Fills new tensors; see :class:`engine.checkpoint.made_weights.Values`."""

    def __init__(self, device: torch.device | str) -> None:
        self._places = torch.arange(CHUNK, dtype=torch.int32, device=device)

    def fill(self, tensor: Tensor, name: str) -> None:
        shape = tuple(tensor.shape)
        self._fill(tensor.view(-1), name, shape, Spread.of(name, shape))

    def fill_quantized(self, weight: QuantizedWeight, name: str) -> None:
        """Fill values and scales. All scales are the same power of two, so that dividing by it is exact."""
        shape = weight.shape
        spread = Spread.of(name, shape)
        largest = LARGEST_FP8 if weight.is_fp8 else LARGEST_INT8
        scale = 2.0 ** math.ceil(math.log2(spread.half_width / largest))
        weight.scales.fill_(scale)
        units = Spread(spread.half_width / scale, spread.middle / scale)
        self._fill(weight.values.view(-1), name, shape, units, rounded=not weight.is_fp8)

    def _fill(
        self, out: Tensor, name: str, shape: Sequence[int], spread: Spread, *, rounded: bool = False
    ) -> None:
        for start in range(0, len(out), CHUNK):
            chunk = out[start : start + CHUNK]
            values = self._values(_key(name, shape, start // CHUNK), len(chunk), spread)
            chunk.copy_(values.round_() if rounded else values)

    def _values(self, key: int, num: int, spread: Spread) -> Tensor:
        """Return values ``[num]`` float32."""
        bits = self._places[:num] ^ key
        for shift, factor in _ROUNDS:
            bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
        bits.bitwise_xor_(_shifted(bits, _LAST_SHIFT))
        values = (bits >> 8).to(torch.float32)  # 24 bits including the sign: exact, also after adding 0.5
        return values.add_(0.5).mul_(spread.half_width / (1 << 23)).add_(spread.middle)


def _key(name: str, shape: Sequence[int], chunk: int) -> int:
    """Return a signed key of 32 bits."""
    digest = hashlib.blake2b(f"{name} {list(shape)} {chunk}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right and fill with zeros. The plain shift of a signed integer would copy the sign bit."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)
