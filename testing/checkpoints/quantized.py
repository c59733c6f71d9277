"""Quantised checkpoints in published formats, made from the checkpoints that tests make.

For each, the same checkpoint with dequantised weights is written as well, for oracles that support only
float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.linear.quantized_weight import FP8, QuantizedWeight

BLOCK = 24
"""Divides hardly any size, so the last blocks are incomplete, and ranks are not cut at block borders."""
NEVER_QUANTIZED = ("embed", "norm", "conv1d", "lm_head", ".gate.", "router", "shared_expert_gate")
KV_SCALES = {"k_proj.k_scale": 0.017, "v_proj.v_scale": 0.031}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """How weights are quantised and stored."""

    stored: torch.dtype
    block: tuple[int | None, int | None]
    """Rows and columns that share a scale; None means all."""
    write: Callable[[str, QuantizedWeight], Tensors]
    """Turns a layer's name and weight into tensors."""
    config: Callable[[list[str]], dict[str, object]]
    """Turns the list of unquantised layers into ``quantization_config``."""
    is_beside: bool = False
    """Whether the configuration is written to ``hf_quant_config.json``, a file next to ``config.json``."""
    has_kv_scales: bool = False


def quantize(weight: Tensor, stored: torch.dtype, block: tuple[int | None, int | None]) -> QuantizedWeight:
    """Quantise symmetrically, with a scale from each block's largest value."""
    rows, columns = block[0] or weight.shape[0], block[1] or weight.shape[1]
    grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    largest = 448.0 if stored == FP8 else 127.0
    padded = torch.zeros(grid[0] * rows, grid[1] * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.view(grid[0], rows, grid[1], columns)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / largest
    units = (blocks / scales[:, None, :, None]).clamp(-largest, largest).view_as(padded)
    values = units[: weight.shape[0], : weight.shape[1]]
    values = values.to(FP8) if stored == FP8 else values.round().to(torch.int8)
    return QuantizedWeight(values.contiguous(), scales, rows, columns)


def write_quantized(source: Path, directory: Path, name: str, *, excluded: tuple[str, ...] = ()) -> Path:
    """Write a copy of the checkpoint ``source`` in format ``name``. Layers with an ``excluded`` part of the
    name stay unquantised. Return its path; :func:`dequantized` of it is the same model in float32.
    """
    form = FORMATS[name]
    shutil.copytree(source, directory)
    plain = shutil.copytree(source, dequantized(directory))
    tensors = load_file(source / "model.safetensors")
    quantized, unquantized, left = dict(tensors), dict(tensors), []
    for key, tensor in tensors.items():
        layer, _, kind = key.rpartition(".")
        if kind != "weight" or tensor.ndim not in (2, 3) or "conv1d" in layer:
            continue
        if any(part in f"{layer}." for part in (*NEVER_QUANTIZED, *excluded)):
            left.append(layer)
            continue
        del quantized[key]
        if tensor.ndim == 3:  # the weights of all experts
            weights = [quantize(one, form.stored, form.block) for one in tensor]
            written = [form.write(layer, weight) for weight in weights]
            quantized |= {name: torch.stack([one[name] for one in written]) for name in written[0]}
            unquantized[key] = torch.stack([weight.dequantized() for weight in weights])
            continue
        weight = quantize(tensor, form.stored, form.block)
        quantized |= form.write(layer, weight)
        unquantized[key] = weight.dequantized()
        if form.has_kv_scales and layer.endswith(".k_proj"):
            prefix = layer.removesuffix("k_proj")
            quantized |= {prefix + scale: torch.tensor(number) for scale, number in KV_SCALES.items()}
    save_file(quantized, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(unquantized, plain / "model.safetensors", metadata={"format": "pt"})
    config = form.config(left)
    if form.is_beside:
        (directory / "hf_quant_config.json").write_text(json.dumps(config))
    else:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return directory


def dequantized(directory: Path) -> Path:
    """Return the path of a quantised checkpoint's float32 copy."""
    return directory.with_name(f"{directory.name}-dequantized")


def _one_scale(layer: str, weight: QuantizedWeight) -> Tensors:
    return {
        f"{layer}.weight": weight.values,
        f"{layer}.weight_scale": weight.scales.view(()),
        f"{layer}.input_scale": torch.tensor(0.1),
    }


def _scales(layer: str, weight: QuantizedWeight) -> Tensors:
    return {f"{layer}.weight": weight.values, f"{layer}.weight_scale": weight.scales}


def _block_scales(layer: str, weight: QuantizedWeight) -> Tensors:
    return {f"{layer}.weight": weight.values, f"{layer}.weight_scale": weight.scales[:, None, :, None]}


def _inverse_scales(layer: str, weight: QuantizedWeight) -> Tensors:
    return {f"{layer}.weight": weight.values, f"{layer}.weight_scale_inv": weight.scales}


def _packed(layer: str, weight: QuantizedWeight) -> Tensors:
    num_inputs = weight.shape[1]
    numbers = torch.nn.functional.pad(weight.values.to(torch.int32) + 128, (0, -num_inputs % 4))
    words = sum(numbers[:, i::4].to(torch.int64) << (8 * i) for i in range(4))
    assert isinstance(words, Tensor)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return {
        f"{layer}.weight_packed": signed.to(torch.int32),
        f"{layer}.weight_scale": weight.scales,
        f"{layer}.weight_shape": torch.tensor(weight.shape),
    }


def _modelopt_beside(left: list[str]) -> dict[str, object]:
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": left}
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}


def _modelopt(left: list[str]) -> dict[str, object]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": [*left, "*.visual.*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }


def _modelopt_blocks(left: list[str]) -> dict[str, object]:
    return {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": BLOCK, "ignore": left}


def _fp8(left: list[str]) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": left,
    }


def _compressed(form: str, **weights: object) -> Callable[[list[str]], dict[str, object]]:
    def config(left: list[str]) -> dict[str, object]:
        patterns = ["re:.*gate$", *(layer for layer in left if not layer.endswith("gate"))]
        args = {"num_bits": 8, "symmetric": True, "dynamic": False, **weights}
        group = {"targets": ["Linear"], "weights": args, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": patterns,
            "kv_cache_scheme": None,
        }

    return config


FORMATS = {
    "modelopt": Format(FP8, (None, None), _one_scale, _modelopt, has_kv_scales=True),
    "modelopt beside": Format(FP8, (None, None), _one_scale, _modelopt_beside, True, True),
    "modelopt block": Format(FP8, (BLOCK, BLOCK), _block_scales, _modelopt_blocks),
    "compressed fp8 tensor": Format(
        FP8, (None, None), _one_scale, _compressed("float-quantized", type="float", strategy="tensor")
    ),
    "compressed fp8 channel": Format(
        FP8, (1, None), _scales, _compressed("float-quantized", type="float", strategy="channel")
    ),
    "compressed fp8 block": Format(
        FP8,
        (BLOCK, BLOCK),
        _scales,
        _compressed("float-quantized", type="float", strategy="block", block_structure=[BLOCK, BLOCK]),
    ),
    "compressed int8 channel": Format(
        torch.int8, (1, None), _scales, _compressed("int-quantized", type="int", strategy="channel")
    ),
    "packed int8 channel": Format(
        torch.int8, (1, None), _packed, _compressed("pack-quantized", type="int", strategy="channel")
    ),
    "packed int8 group": Format(
        torch.int8,
        (1, 16),
        _packed,
        _compressed("pack-quantized", type="int", strategy="group", group_size=16),
    ),
    "block fp8": Format(FP8, (BLOCK, BLOCK), _inverse_scales, _fp8),
}
