"""Which operators wait for the device, and so must not be called on the path of a step.

Found in torch's sources; a host operand is a tensor that is not on the device.

| operator | why it waits |
|---|---|
| ``_local_scalar_dense``, ``equal``, ``is_nonzero`` | the host reads a value |
| ``nonzero``, ``masked_select``, ``unique…``, ``bincount`` | the result's shape depends on values |
| ``repeat_interleave`` without ``output_size`` | the same |
| ``index`` and ``index_put_`` with a mask | the same |
| ``copy_`` between host and device | unless it is ``non_blocking`` and the host's memory is pinned |
| ``t[i] = value`` with a number | torch copies the number to the elements from pageable memory |
| ``_grouped_mm`` outside bfloat16 | torch falls back to a loop, and reads the offsets |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "allclose"}
_SHAPED_BY_DATA = {
    "nonzero",
    "argwhere",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def reason_to_wait(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: Callable[[Any], bool]
) -> str:
    """Return why ``aten::name`` makes the host wait for the device; empty if it does not.

    ``on_device`` tells whether a value is a tensor on the device. ``copy_`` is the caller's business.
    """
    if name in _READS:
        return "the host reads a value"
    if name in _SHAPED_BY_DATA:
        return "the result's shape depends on values"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "the result's shape depends on values"
    if name in _INDEXING:
        return _of_index(args, on_device)
    if "grouped_mm" in name and args[0].dtype != torch.bfloat16:
        return f"a grouped product of {args[0].dtype} reads its offsets on the host"
    return ""


def _of_index(args: tuple[Any, ...], on_device: Callable[[Any], bool]) -> str:
    indices = [one for one in args[1] if isinstance(one, Tensor)]
    if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
        return "the number of selected elements depends on values"
    if any(not on_device(one) for one in indices):
        return "an index in host memory is copied to the device"
    if len(args) > 2 and isinstance(args[2], Tensor) and not on_device(args[2]):
        return "a value in host memory is copied to the device"
    return ""
