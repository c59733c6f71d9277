"""A checkpoint's tensors, memory-mapped and handed out one by one.

On CPU a tensor that has the wanted dtype on disk is a view of the mapped file: loading reads nothing, and
two servers on one machine share the pages. Other tensors are converted one at a time, so that the peak
memory is the model plus one tensor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.quantization import Quantization
from engine.checkpoint.quantized_tensors import UNUSED_SUFFIXES, OneOfStack, is_quantized, quantized_weight
from engine.checkpoint.weight_dtype import WeightDtype
from kernels.linear.quantized_weight import QuantizedWeight, quantized_by_rows
from wire.errors import ModelLoadError
from wire.messages.layout import Ranges

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"

LoadFormat = Literal["auto", "dummy"]
"""``auto``: the checkpoint's safetensors; ``dummy``: random weights
(:mod:`engine.checkpoint.dummy_weights`)."""


def weight_paths(directory: str | Path) -> list[Path]:
    """Return the safetensors files: those in the index, else ``model.safetensors``, else all that exist.

    Raises :class:`ModelLoadError` if there is none, if the index is invalid, or if it names a missing file.
    """
    directory = Path(directory)
    index = directory / INDEX_NAME
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(
                f"{index} is not a safetensors index with a weight_map: {error!r}"
            ) from error
        paths = [directory / name for name in files]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelLoadError(f"{index} names files that are not there: {', '.join(missing)}")
        return paths
    single = directory / "model.safetensors"
    paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelLoadError(f"{directory} holds no safetensors file; other weight formats are not supported")
    return paths


def stored_names(directory: str | Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors; empty if there are no weights yet. Reads only file headers.

    Raises :class:`ModelLoadError` as :func:`weight_paths` does, and if a file is not a safetensors file.
    """
    directory = Path(directory)
    if not any(directory.glob("*.safetensors")):
        return frozenset()
    return frozenset(name for path in weight_paths(directory) for name in _opened(path).keys())  # noqa: SIM118


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error


@dataclass(frozen=True)
class Part:
    """A tensor-parallel rank's part of a weight: half-open ranges of one axis, concatenated."""

    axis: int = 0
    ranges: Ranges | None = None
    """None means all."""

    def is_all_of(self, shape: Sequence[int]) -> bool:
        if self.ranges is None:
            return True
        ends = [0, *(stop for _, stop in self.ranges)]
        return [start for start, _ in self.ranges] == ends[:-1] and ends[-1] == shape[self.axis]

    def of(self, stored: Any) -> Tensor:
        """Cut the part out of ``stored``. A slice of safetensors reads only the indexed ranges."""
        assert self.ranges is not None
        before = (slice(None),) * self.axis
        return torch.cat([stored[(*before, slice(*one))] for one in self.ranges], dim=self.axis)

    def of_quantized(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Cut the part out of a linear layer's quantised weight."""
        assert self.ranges is not None
        return weight.cut(self.axis, self.ranges)


WHOLE = Part()


def of_outputs(*ranges: tuple[int, int]) -> Part:
    """Return a part of a weight's outputs, which are its rows."""
    return Part(0, ranges)


def of_inputs(*ranges: tuple[int, int]) -> Part:
    """Return a part of a weight's inputs, which are its columns."""
    return Part(1, ranges)


@dataclass(frozen=True)
class OneOf:
    """One of several layers whose weights are stored in one tensor."""

    index: int
    size: int


class Weights(Protocol):
    """A model's source of tensors, by their published names."""

    directory: Path
    dtype: torch.dtype
    """Dtype of the model."""
    device: torch.device
    batch_invariant: bool
    """Whether a row of the model's layers must have the same bits in every batch."""
    weight_dtype: WeightDtype
    """How linear layers keep their weights, as far as a checkpoint does not quantise them."""
    bytes_taken: int
    """Stored bytes of all tensors taken so far."""

    def __contains__(self, name: str) -> bool: ...

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        part: Part = WHOLE,
    ) -> Tensor:
        """Return tensor ``name`` of ``shape``, or ``part`` of it. ``dtype`` is by default the model's."""

    def take_weight(
        self, layer: str, shape: tuple[int, int], *, part: Part = WHOLE, of: OneOf | None = None
    ) -> Tensor | QuantizedWeight:
        """Return the weight ``[out, in]`` of the linear layer ``layer``, or ``part`` of it.

        A weight that is stored quantised stays quantised. With ``weight_dtype`` int8 any other is quantised
        before it is cut, so that all ranks have the same numbers; else it has the model's dtype. ``of``
        selects one layer if ``layer`` names tensors of several quantised layers.
        """

    def take_stack(
        self, name: str, shape: tuple[int, int, int], *, part: Part = WHOLE
    ) -> list[Tensor] | list[QuantizedWeight]:
        """Return the weights ``[out, in]`` in tensor ``name`` of ``shape`` ``[layers, out, in]``, or ``part``
        of them. The tensor is not stored quantised; see :meth:`take_weight`."""

    def is_quantized(self, layer: str) -> bool:
        """Return whether the checkpoint stores a quantised weight for ``layer``."""

    def number(self, *names: str, default: float) -> float:
        """Return the only number in the first of these tensors that exists, else ``default``."""

    def unused(self) -> list[str]:
        """Return the sorted names of tensors that were not taken."""


def take_unquantized(
    weights: Weights, name: str, shape: tuple[int, int], part: Part
) -> Tensor | QuantizedWeight:
    """Take the weight of a linear layer that is not stored quantised; see :meth:`Weights.take_weight`."""
    if weights.weight_dtype != "int8":
        return weights.take(name, shape, part=part)
    whole = quantized_by_rows(weights.take(name, shape))
    return whole if part.is_all_of(shape) else part.of_quantized(whole)


def take_unquantized_stack(
    weights: Weights, name: str, shape: tuple[int, int, int], part: Part
) -> list[Tensor] | list[QuantizedWeight]:
    """See :meth:`Weights.take_stack`."""
    if weights.weight_dtype != "int8":
        return list(weights.take(name, shape, part=part).unbind())
    taken = weights.take(name, shape, part=part if part.axis == 0 else WHOLE)
    whole = [quantized_by_rows(weight) for weight in taken.unbind()]
    if part.axis == 0 or part.is_all_of(shape):
        return whole
    of_one = Part(part.axis - 1, part.ranges)
    return [of_one.of_quantized(weight) for weight in whole]


class WeightFiles:
    """All tensors of a checkpoint's files, by name."""

    def __init__(
        self,
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        quantization: Quantization | None = None,
        batch_invariant: bool = False,
        weight_dtype: WeightDtype = "float32",
    ) -> None:
        self.directory = Path(directory)
        self.weight_dtype = weight_dtype
        self.dtype = dtype
        self.batch_invariant = batch_invariant
        self.device = torch.device(device)
        self.quantization = quantization
        self._is_warned = False
        self.bytes_taken = 0
        self._taken: set[str] = set()
        self._files: dict[Path, Any] = {}  # safe_open is untyped
        self._path_of: dict[str, Path] = {}
        for path in weight_paths(directory):
            self._files[path] = _opened(path)
            self._path_of.update(dict.fromkeys(self._files[path].keys(), path))

    def __contains__(self, name: str) -> bool:
        return name in self._path_of

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        part: Part = WHOLE,
    ) -> Tensor:
        """See :meth:`Weights.take`.

        On CPU a whole tensor may be a view of the mapped file: read it, never write it. For a part, only the
        part's bytes are read.
        Raises :class:`ModelLoadError` if the tensor is missing, misshapen or not of floating point.
        """
        if name not in self._path_of:
            raise ModelLoadError(f"{self.directory} lacks tensor {name} of shape {list(shape)}")
        path = self._path_of[name]
        stored = self._files[path].get_slice(name)
        if stored.get_shape() != list(shape):
            raise ModelLoadError(
                f"{path}: tensor {name} has shape {stored.get_shape()}; expected {list(shape)} by config.json"
            )
        if stored.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise ModelLoadError(
                f"{path}: tensor {name} is stored as {stored.get_dtype()}; expected F32, BF16 or F16 "
                "(only the weights of linear layers may be quantised)"
            )
        self._taken.add(name)
        tensor: Tensor = self._files[path].get_tensor(name) if part.is_all_of(shape) else part.of(stored)
        self.bytes_taken += tensor.nbytes
        return tensor.to(self.device, dtype or self.dtype)

    def take_weight(
        self, layer: str, shape: tuple[int, int], *, part: Part = WHOLE, of: OneOf | None = None
    ) -> Tensor | QuantizedWeight:
        """See :meth:`Weights.take_weight`.

        Raises :class:`ModelLoadError` as :meth:`take` and :func:`quantized_weight` do.
        """
        is_stored_so = self.is_quantized(layer)
        self._warn_if_unexpected(layer, is_stored_so)
        if not is_stored_so:
            return take_unquantized(self, f"{layer}.weight", shape, part)
        source = self if of is None else OneOfStack(self, of.index, of.size)
        weight = quantized_weight(source, layer, shape, self.quantization)
        if not part.is_all_of(shape):
            weight = part.of_quantized(weight)
        self.bytes_taken += weight.nbytes
        return weight.to(self.device)

    def take_stack(
        self, name: str, shape: tuple[int, int, int], *, part: Part = WHOLE
    ) -> list[Tensor] | list[QuantizedWeight]:
        """See :meth:`Weights.take_stack`."""
        return take_unquantized_stack(self, name, shape, part)

    def is_quantized(self, layer: str) -> bool:
        """See :meth:`Weights.is_quantized`."""
        return is_quantized(self, layer)

    def _warn_if_unexpected(self, layer: str, is_stored_so: bool) -> None:
        """Warn once if files and configuration disagree: ``twinfang plan`` knows only the configuration."""
        if self.quantization is None or self._is_warned:
            return
        if is_stored_so != (self.quantization.scheme_of(layer) is not None):
            self._is_warned = True
            stored, said = ("quantised", "not") if is_stored_so else ("not quantised", "quantised")
            logger.warning(
                "%s: %s is stored %s, but %s according to its configuration. This may hold for other tensors "
                "too; the stored form is used",
                *(self.directory, layer, stored, said),
            )

    def number(self, *names: str, default: float) -> float:
        """See :meth:`Weights.number`. Raises :class:`ModelLoadError` if the tensor isn't one finite value."""
        name = next((name for name in names if name in self), None)
        if name is None:
            return default
        found = self.stored(name)
        if found.numel() != 1 or not found.isfinite().all():
            raise ModelLoadError(f"{self._path_of[name]}: tensor {name} is not one finite number")
        return float(found)

    def stored_dtype(self, name: str) -> str | None:
        """See :class:`engine.checkpoint.quantized_tensors.StoredTensors`, also for the next two methods."""
        path = self._path_of.get(name)
        return None if path is None else str(self._files[path].get_slice(name).get_dtype())

    def stored(self, name: str) -> Tensor:
        self._taken.add(name)
        tensor: Tensor = self._files[self._path_of[name]].get_tensor(name)
        return tensor

    def path_of(self, name: str) -> Path:
        return self._path_of[name]

    def unused(self) -> list[str]:
        left = self._path_of.keys() - self._taken
        if self.quantization is not None:
            left = {name for name in left if not name.endswith(UNUSED_SUFFIXES)}
        return sorted(left)
