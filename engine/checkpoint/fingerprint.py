"""The fingerprint of a model: a short name for exactly its weights with exactly its configuration.

Two servers that hand state over must compute with the same model. Comparing fingerprints checks this
without reading all weights: the digest covers the configuration, every safetensors header (names,
dtypes, shapes, offsets) and a few sampled bytes of every tensor.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from engine.checkpoint.quantization import MODELOPT_FILE
from engine.checkpoint.weight_dtype import WeightDtype
from engine.checkpoint.weights import LoadFormat, weight_paths
from wire.errors import ModelLoadError

SAMPLES = 4
SAMPLE_BYTES = 64
DUMMY_WEIGHTS = b"dummy weights 1"
"""Increase the number when :mod:`engine.checkpoint.dummy_weights` changes its values."""
_UNRELATED_FIELDS = ("_name_or_path", "transformers_version")


def fingerprint(
    model_dir: str | Path,
    dtype: torch.dtype | str,
    load_format: LoadFormat = "auto",
    *,
    stochastic_rounding: bool = False,
    batch_invariant: bool = False,
    weight_dtype: WeightDtype = "float32",
) -> str:
    """Return 64 hex digits, equal for all copies of a checkpoint that are loaded in the same dtype.

    The path doesn't matter. A retrained tensor changes the fingerprint unless all its sampled bytes stayed
    the same. The fingerprint of dummy weights depends only on the configuration and never equals a
    checkpoint's.
    """
    directory = Path(model_dir)
    digest = hashlib.sha256()
    digest.update(_canonical(directory / "config.json"))
    if (directory / MODELOPT_FILE).exists():
        digest.update(_canonical(directory / MODELOPT_FILE))
    digest.update(str(dtype).removeprefix("torch.").encode())
    if stochastic_rounding:  # the caches' layout doesn't show how states are rounded, but tokens depend on it
        digest.update(b"stochastic rounding")
    if batch_invariant:  # another order of sums, and states at other places
        digest.update(b"batch invariant")
    if weight_dtype in ("bfloat16", "int8"):  # auto has the bits of float32
        digest.update(f"weights in {weight_dtype}".encode())
    if load_format == "dummy":
        digest.update(DUMMY_WEIGHTS)
        return digest.hexdigest()
    for path in weight_paths(directory):
        _add_weights(digest, path)
    return digest.hexdigest()


def _canonical(path: Path) -> bytes:
    """Return a JSON file's object in one canonical layout, without unrelated fields."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} can't be read: {error}") from error
    kept = {name: value for name, value in config.items() if name not in _UNRELATED_FIELDS}
    return json.dumps(kept, sort_keys=True).encode()


def _add_weights(digest: hashlib._Hash, path: Path) -> None:
    """Add one file to the digest: an 8-byte header length, the JSON header, then the tensors' bytes."""
    try:
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            data_start = file.tell()
            digest.update(header)
            for name, entry in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                for sample in range(SAMPLES):
                    last = max(begin, end - SAMPLE_BYTES)
                    offset = begin + (last - begin) * sample // (SAMPLES - 1)
                    file.seek(data_start + offset)
                    digest.update(file.read(min(SAMPLE_BYTES, end - begin)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error!r}") from error
