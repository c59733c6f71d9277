"""How a CPU keeps the weights of linear layers, routed experts and the output head of a float32 model.

| value | a weight is kept |
|---|---|
| ``auto`` | in bfloat16 if all of its numbers are bfloat16 numbers, else in float32 |
| ``float32`` | in the model's dtype |
| ``bfloat16`` | rounded to bfloat16, after the factors of its family |
| ``int8`` | rounded to int8, with a scale for each output |

Products and sums are float32 in all cases (:mod:`kernels.linear.packed_linear`,
:mod:`kernels.linear.quantized_linear_cpu`). So ``auto`` gives the same bits as ``float32``. Weights that a
checkpoint stores quantised stay as they are, and so do embeddings, norms, convolutions and routers.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from wire.errors import ConfigError

WeightDtype = Literal["auto", "float32", "bfloat16", "int8"]


def resolve(
    wanted: WeightDtype, dtype: torch.dtype, device: torch.device, *, is_stored_in_bfloat16: bool
) -> WeightDtype:
    """Return ``wanted``; for ``auto`` ``float32`` where nothing is to be gained: on a GPU, in a bfloat16
    model, or if the checkpoint is not stored in bfloat16.

    Raises :class:`ConfigError` for an unknown value, and for a dtype that only float32 models on a CPU have.
    """
    if wanted not in get_args(WeightDtype):
        raise ConfigError(f"`weight_dtype` must be one of {', '.join(get_args(WeightDtype))}, got {wanted!r}")
    has_choice = device.type == "cpu" and dtype == torch.float32
    if wanted == "auto":
        return "auto" if has_choice and is_stored_in_bfloat16 else "float32"
    if has_choice:
        return wanted
    name = str(dtype).removeprefix("torch.")
    raise ConfigError(
        f"`weight_dtype` {wanted} is for models that compute in float32 on a CPU, and this one computes in "
        f"{name} on {device.type}; leave it out, or set `dtype` float32 and `device` cpu"
    )


def item_bytes(weight_dtype: WeightDtype, dtype: torch.dtype) -> int:
    """Return the bytes of one weight in a model of ``dtype``, if a checkpoint has what it says."""
    return {"auto": 2, "float32": dtype.itemsize, "bfloat16": 2, "int8": 1}[weight_dtype]


def narrowed(weight: Tensor, weight_dtype: WeightDtype) -> Tensor:
    """Return a float32 weight in the dtype in which it is kept; see the table above.

    int8 is no dtype of a tensor without scales: such weights are quantised before (``Weights.take_weight``).
    """
    if weight_dtype not in ("auto", "bfloat16"):
        return weight
    narrow = weight.to(torch.bfloat16)
    return narrow if weight_dtype == "bfloat16" or torch.equal(narrow.to(weight.dtype), weight) else weight
