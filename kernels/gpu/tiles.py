"""Tile sizes of the Triton kernels: measured sizes by device and shape, or else a kernel's own default.

    TILES = choose(tile_request(sizes of the call), device)

A kernel's request names the sizes that its tiles depend on, but not the exact number of rows. A tile can
determine the order of a sum, and a row's result should not depend on how many rows are computed with it. The
tiles come from
``tile_tables/<device name>.json``, which ``python -m benchmarks.gpu.tune_tiles`` writes on a GPU; nothing is
tuned while a server starts. Without a file for the device, or without an entry for the shape, the kernel's
default is used. Defaults are made for sm_90 and checked by compiling them. The file format is described in
tile_tables/README.md.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tiles = dict[str, int]
"""A kernel's launch settings: ``BLOCK_…`` and other constants, ``num_warps``, ``num_stages``."""

DIRECTORY = Path(__file__).parent / "tile_tables"
_ANY_INTEGER = {"num_stages", "PROGRAMS_PER_SM"}
"""Settings that may be any positive integer. All others have to be powers of two."""


@dataclass(frozen=True)
class TileRequest:
    """A kernel's request: tiles of ``op`` at ``shape`` (``dtype=bfloat16 head_dim=64``)."""

    op: str
    shape: str
    default: Tiles

    @classmethod
    def of(cls, op: str, default: Tiles, **sizes: object) -> TileRequest:
        """Return a request. The shape's text has the arguments' order, and short names of dtypes."""
        text = " ".join(f"{name}={str(size).removeprefix('torch.')}" for name, size in sizes.items())
        return cls(op, text, default)


@dataclass(frozen=True)
class TileTable:
    """The tiles measured on one device. ``entries[op][shape]`` has ``tiles`` and times in µs."""

    device: str
    entries: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> TileTable:
        """Read a table. Raises a ValueError that names the file and the error in it."""
        try:
            content = json.loads(path.read_text())
            device, entries, made_with = content["device"], content["ops"], content["made_with"]
            for op, shapes in entries.items():
                for shape, entry in shapes.items():
                    _check_tiles(f"{op}, {shape}", entry["tiles"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a valid table of tiles: {error!r}") from error
        if path.name != file_name(device):
            raise ValueError(f"{path} is for {device!r}, whose table is called {file_name(device)}")
        return cls(device, entries, made_with)

    def write(self, directory: Path) -> Path:
        """Write, atomically, the file that :func:`table_of` looks for in :data:`DIRECTORY`."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / file_name(self.device)
        content = {"device": self.device, "made_with": self.made_with, "ops": self.entries}
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        return draft.replace(path)

    def tiles(self, request: TileRequest) -> Tiles:
        """Return a request's tiles. Raises ValueError if the entry's settings are not those of the kernel."""
        entry = self.entries.get(request.op, {}).get(request.shape)
        if entry is None:
            return request.default
        tiles: Tiles = entry["tiles"]
        if tiles.keys() != request.default.keys():
            raise ValueError(
                f"tiles of {request.op} on {self.device} are {sorted(tiles)}, the kernel takes "
                f"{sorted(request.default)}; tune again: python -m benchmarks.gpu.tune_tiles"
            )
        return tiles


def choose(request: TileRequest, device: torch.device) -> Tiles:
    """Return the tiles for a launch on ``device``. Without a GPU (Triton's interpreter), use the default."""
    if device.type != "cuda":
        return request.default
    return table_of(_device_name(device)).tiles(request)


@functools.cache
def table_of(device: str) -> TileTable:
    """Return a device's table from :data:`DIRECTORY`, read once; an empty table if it has none."""
    path = DIRECTORY / file_name(device)
    return TileTable.read(path) if path.exists() else TileTable(device)


def file_name(device: str) -> str:
    """Return the table's file name: ``NVIDIA_H200.json`` for ``NVIDIA H200``."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in device) + ".json"


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def _check_tiles(where: str, tiles: Tiles) -> None:
    for name, value in tiles.items():
        if type(value) is not int or value < 1 or (name not in _ANY_INTEGER and value & (value - 1)):
            raise ValueError(f"{where}: invalid {name} {value!r}")
