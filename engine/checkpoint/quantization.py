"""How a checkpoint's weights are quantised according to its configuration, in one form for all methods.

| `quant_method` | format | weights | one scale per |
|---|---|---|---|
| `modelopt`, or `hf_quant_config.json` | `quant_algo` FP8 | float8_e4m3fn | tensor |
| | FP8_PER_CHANNEL_PER_TOKEN | float8_e4m3fn | channel |
| | FP8_PB_WO | float8_e4m3fn | block of 128 x 128, or of `group_size` |
| | MIXED_PRECISION | each layer in `quantized_layers` has one of the formats above | |
| `compressed-tensors` | `float-quantized` | float8_e4m3fn | tensor, channel, block |
| `compressed-tensors` | `int-quantized` | int8 | tensor, channel, group |
| `compressed-tensors` | `pack-quantized`, 8 bits | four int8 in an int32 | channel, group |
| `fp8` | | float8_e4m3fn | block of `weight_block_size`, tensor |

Any other method raises an error that names it. Settings for inputs are ignored: inputs are not quantised
(docs/quantization.md). When a tensor is loaded, its stored dtype tells whether it is quantised
(:mod:`engine.checkpoint.quantized_tensors`). The rules in this module are used for planning, for dummy
weights and for the sizes of blocks.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engine.checkpoint.config_fields import ConfigFields
from kernels.linear.quantized_weight import FP8, QuantizedWeight
from wire.errors import ModelLoadError

MODELOPT_FILE = "hf_quant_config.json"
SUPPORTED = (
    "FP8 of modelopt (quant_algo FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, or MIXED_PRECISION of these), "
    "compressed-tensors (float-quantized) and fp8, and int8 of "
    "compressed-tensors (int-quantized, or pack-quantized with 8 bits)"
)
_MODELOPT_BLOCK = 128
_DENSE_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")

Stored = Literal["fp8", "int8", "packed int8"]


@dataclass(frozen=True)
class WeightScheme:
    """How one layer's weight is stored."""

    stored: Stored
    block_rows: int | None
    """Number of outputs that share a scale; None means all."""
    block_columns: int | None
    """Number of inputs that share a scale; None means all."""

    def scale_grid(self, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        """Return the number of scales along each axis."""
        rows, columns = self.block_rows or num_outputs, self.block_columns or num_inputs
        return -(-num_outputs // rows), -(-num_inputs // columns)

    def empty_weight(self, shape: tuple[int, int], device: torch.device) -> QuantizedWeight:
        """Make an unpacked weight ``[out, in]`` of this scheme with uninitialized memory."""
        values = torch.empty(shape, dtype=FP8 if self.stored == "fp8" else torch.int8, device=device)
        scales = torch.empty(self.scale_grid(*shape), device=device)
        return QuantizedWeight(values, scales, self.block_rows or shape[0], self.block_columns or shape[1])


@dataclass(frozen=True)
class ModuleNames:
    """A set of modules: names, and regular expressions that match from the start of a name."""

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    with_children: bool = False
    """Whether a name also includes all modules below it, and all modules whose name ends with it."""

    def __contains__(self, module: str) -> bool:
        if module in self.names or any(pattern.match(module) for pattern in self.patterns):
            return True
        if not self.with_children:
            return False
        parts = module.split(".")
        wholes = [".".join(kept) for i in range(1, len(parts)) for kept in (parts[:i], parts[i:])]
        return not self.names.isdisjoint(wholes)


@dataclass(frozen=True)
class Quantization:
    """Tells which linear layers are quantised, and how."""

    method: str
    schemes: tuple[tuple[ModuleNames | None, WeightScheme], ...]
    """Modules and their scheme; None means all linear layers. If several entries contain a module, the first
    one counts."""
    excluded: ModuleNames
    kv_cache: Literal["fp8"] | None
    """The KV format that the checkpoint was calibrated for."""

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Return the scheme of a linear layer by its published name; None if the layer is not quantised."""
        if module in self.excluded:
            return None
        found = (scheme for names, scheme in self.schemes if names is None or module in names)
        return next(found, None)

    def scheme_stored_as(self, module: str, stored: Stored) -> WeightScheme | None:
        """Return ``module``'s own scheme if it stores weights as ``stored``, else the first one that does."""
        own = self.scheme_of(module)
        if own is not None and own.stored == stored:
            return own
        return next((scheme for _, scheme in self.schemes if scheme.stored == stored), None)


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """Read ``quantization_config`` of ``config.json``, else ``hf_quant_config.json`` in the same directory.

    None if weights are not quantised. Raises :class:`ModelLoadError` that names the unsupported value and
    the supported ones.
    """
    config = fields.raw.get("quantization_config", fields.raw.get("compression_config"))
    beside = fields.path.parent / MODELOPT_FILE
    if config is not None and not isinstance(config, dict):
        raise _Reader(fields.path, {}).error("quantization_config", config, "an object")
    # In some releases config.json names only the quantisation method.
    is_said = config is not None and (config.get("quant_method") != "modelopt" or _says_layers(config))
    if not is_said and beside.exists():
        return _Reader(beside, ConfigFields.read(beside).raw).modelopt()
    if config is None:
        return None
    reader, method = _Reader(fields.path, config), config.get("quant_method")
    readers: dict[object, Callable[[], Quantization]] = {
        "modelopt": reader.modelopt,
        "compressed-tensors": reader.compressed_tensors,
        "fp8": reader.block_fp8,
    }
    if method not in readers:
        raise reader.error("quant_method", method)
    return readers[method]()


@dataclass(frozen=True)
class _Reader:
    path: Path
    config: dict[str, Any]

    def error(self, name: str, found: object, expected: str = "") -> ModelLoadError:
        if expected:
            return ModelLoadError(f"{self.path}: {name} is {found!r}; expected {expected}")
        return ModelLoadError(
            f"{self.path}: the checkpoint is quantised with {name} {found!r}, which is not supported; "
            f"supported are {SUPPORTED}. Use another release of the model"
        )

    def modelopt(self) -> Quantization:
        inner = self.config.get("quantization", self.config)
        if not isinstance(inner, dict):
            raise self.error("quantization", inner, "an object")
        excluded = self.names(inner, "exclude_modules", "ignore")
        literal, wild = _split(excluded, lambda name: not set(name) & set("*?["))
        patterns = tuple(re.compile(fnmatch.translate(pattern)) for pattern in wild)
        kv_cache = inner.get("kv_cache_quant_algo")
        is_fp8 = str(kv_cache).upper() == "FP8" if kv_cache else self.is_fp8_kv(inner)
        return Quantization(
            "modelopt",
            self.modelopt_schemes(inner),
            ModuleNames(frozenset(literal), patterns, with_children=True),
            "fp8" if is_fp8 else None,
        )

    def modelopt_schemes(self, config: dict[str, Any]) -> tuple[tuple[ModuleNames | None, WeightScheme], ...]:
        """Read one scheme per layer, or one scheme for all layers."""
        if str(config.get("quant_algo")).upper() != "MIXED_PRECISION":
            return ((None, self.modelopt_scheme(config)),)
        layers = config.get("quantized_layers")
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise self.error("quantized_layers", layers, "an object of layers")
        names: dict[WeightScheme, set[str]] = {}
        for name, layer in layers.items():
            if layer.get("quant_algo") not in (None, "UNQUANTIZED"):
                names.setdefault(self.modelopt_scheme(layer), set()).add(name)
        return tuple((ModuleNames(frozenset(own), with_children=True), one) for one, own in names.items())

    def modelopt_scheme(self, config: dict[str, Any]) -> WeightScheme:
        algorithm = str(config.get("quant_algo")).upper()
        if algorithm == "FP8":
            return WeightScheme("fp8", None, None)
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return WeightScheme("fp8", 1, None)
        if algorithm != "FP8_PB_WO":
            raise self.error("quant_algo", config.get("quant_algo"))
        size = config.get("group_size") or _MODELOPT_BLOCK
        return WeightScheme("fp8", *self.block([size, size], "group_size"))

    def block_fp8(self) -> Quantization:
        if self.config.get("expert_dtype", "fp8") != "fp8":
            raise self.error("expert_dtype", self.config["expert_dtype"])
        if self.config.get("modules_to_convert"):
            raise self.error("modules_to_convert", self.config["modules_to_convert"])
        block = self.config.get("weight_block_size")
        rows, columns = (None, None) if block is None else self.block(block, "weight_block_size")
        excluded = self.names(self.config, "modules_to_not_convert", "ignored_layers")
        literal, patterns = _split(excluded, lambda name: re.escape(name).replace(r"\.", ".") == name)
        return Quantization(
            "fp8",
            ((None, WeightScheme("fp8", rows, columns)),),
            ModuleNames(
                frozenset(literal),
                tuple(self.pattern(rf"(?:{one})(?:(?<=\.)|(?=\.|$))") for one in patterns),
                with_children=True,
            ),
            None,
        )

    def compressed_tensors(self) -> Quantization:
        sparsity = self.config.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise self.error("sparsity_config", sparsity["format"])
        if (self.config.get("transform_config") or {}).get("config_groups"):
            raise self.error("transform_config", "config_groups")
        if self.config.get("quantization_status", "compressed") != "compressed":
            raise self.error("quantization_status", self.config["quantization_status"])
        groups = self.config.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise self.error("config_groups", groups, "an object of groups")
        return Quantization(
            "compressed-tensors",
            tuple((self.targets(group), self.group_scheme(group)) for group in groups.values()),
            self.module_names(self.names(self.config, "ignore")),
            "fp8" if self.is_fp8_kv(self.config) else None,
        )

    def targets(self, group: dict[str, Any]) -> ModuleNames | None:
        found = self.names(group, "targets")
        others = [name for name in found if name[:1].isupper() and name != "Linear"]
        if others:
            raise self.error("targets", others[0])
        return None if "Linear" in found else self.module_names(found)

    def module_names(self, found: Iterable[str]) -> ModuleNames:
        """Make a set of modules. ``re:`` marks regular expressions; other entries are whole names."""
        expressions, names = _split(found, lambda name: name.startswith("re:"))
        return ModuleNames(
            frozenset(names), tuple(self.pattern(one.removeprefix("re:")) for one in expressions)
        )

    def group_scheme(self, group: dict[str, Any]) -> WeightScheme:
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise self.error("weights", weights, "an object")
        kind, num_bits = weights.get("type", "int"), weights.get("num_bits", 8)
        form = group.get("format") or self.config.get("format")
        if num_bits != 8 or kind not in ("int", "float"):
            raise self.error("weights", f"{kind} of {num_bits} bits")
        if form != "pack-quantized" and form not in _DENSE_FORMATS:
            raise self.error("format", form)
        if form == "pack-quantized" and kind != "int":
            raise self.error("format 'pack-quantized', weights", kind)
        if not weights.get("symmetric", True):
            raise self.error("weights", "asymmetric, with zero points")
        if weights.get("actorder") == "group":
            raise self.error("actorder", "group")
        rows, columns = self.strategy(weights)
        stored: Stored = "fp8" if kind == "float" else "packed int8" if form == "pack-quantized" else "int8"
        return WeightScheme(stored, rows, columns)

    def strategy(self, weights: dict[str, Any]) -> tuple[int | None, int | None]:
        """Read how many rows and columns share a scale."""
        group_size = weights.get("group_size")
        name = weights.get("strategy") or ("tensor" if group_size in (None, -1) else "group")
        if name == "tensor":
            return None, None
        if name == "channel":
            return 1, None
        if name == "group":
            if not isinstance(group_size, int) or group_size < 1:
                raise self.error("group_size", group_size, "a positive integer")
            return 1, group_size
        if name == "block":
            return self.block(weights.get("block_structure"), "block_structure")
        raise self.error("strategy", name)

    def block(self, found: object, name: str) -> tuple[int, int]:
        if isinstance(found, list) and len(found) == 2:
            rows, columns = found
            if isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) > 0:
                return rows, columns
        raise self.error(name, found, "a pair of positive integers")

    def is_fp8_kv(self, config: dict[str, Any]) -> bool:
        """Return whether KV is FP8 with one scale per tensor. The cache supports no other scales."""
        scheme = config.get("kv_cache_scheme")
        if not isinstance(scheme, dict):
            return False
        is_per_tensor = scheme.get("strategy", "tensor") == "tensor"
        return is_per_tensor and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)

    def names(self, config: dict[str, Any], *fields: str) -> list[str]:
        """Read a list of names from the first of ``fields`` that is present; empty if none is."""
        name = next((name for name in fields if config.get(name) is not None), fields[0])
        found = config.get(name) or []
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise self.error(name, found, "a list of names")
        return found

    def pattern(self, expression: str) -> re.Pattern[str]:
        try:
            return re.compile(expression)
        except re.error as error:
            raise self.error("pattern", expression, f"a regular expression ({error})") from error


def _says_layers(config: dict[str, Any]) -> bool:
    """Return whether ``config`` names a format for layers, not only that some layers are quantised."""
    algorithm = config.get("quant_algo")
    is_mixed = str(algorithm).upper() == "MIXED_PRECISION"
    return algorithm is not None and (not is_mixed or "quantized_layers" in config)


def _split(names: Iterable[str], is_first: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    first: list[str] = []
    second: list[str] = []
    for name in names:
        (first if is_first(name) else second).append(name)
    return first, second
