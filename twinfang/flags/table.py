"""Flags of all commands; a router's are in router_flags.py, those that ``autoscale`` alone has in its folder.
Defaults are those of the configuration classes, which import torch; a test compares them."""

from __future__ import annotations

from pathlib import Path

from twinfang.flags import ranks as rank_flags
from twinfang.flags.flag import Flag, FlagGroup
from twinfang.flags.values import (
    address,
    addresses,
    file_path,
    http_url,
    integer,
    model_directory,
    one_of,
    only,
    port_or_off,
    positive,
    some_text,
    yes_or_no,
)

BUNDLED_MODEL = Path(__file__).parents[1] / "bundled_model"
"""A small model that comes with the package, so that everything can be tried without a download."""


_port = integer(0, 65535)
_at_least_one = integer(1)
_seconds = positive("seconds")

MODEL = Flag(
    *("--model", "DIR", model_directory, "Hugging Face model directory"),
    default=BUNDLED_MODEL,
    default_text="a small model that comes with Twinfang",
    setting="model_dir",
)
SERVED_MODEL_NAME = Flag(
    *("--served-model-name", "NAME", some_text, "what clients call the model"),
    default_text="the directory's name",
)
LOAD_FORMAT = Flag(
    *("--load-format", "auto|dummy", one_of("auto", "dummy")),
    "auto: the directory's safetensors; dummy: random weights, made on the device by config.json alone, to "
    "measure speed",
    default="auto",
)
DTYPE = Flag(
    *("--dtype", "auto|float32|bfloat16", one_of("auto", "float32", "bfloat16")),
    "what weights, KV and convolution states are kept in; auto: float32 on a CPU, the checkpoint's on a GPU",
    default="auto",
)
DEVICE = Flag(
    *("--device", "auto|cpu|cuda", one_of("auto", "cpu", "cuda"), "auto: the GPU where there is one"),
    default="auto",
)
MAX_MODEL_LEN = Flag(
    *("--max-model-len", "TOKENS", _at_least_one, "longest prompt and answer together"),
    default_text="the checkpoint's limit",
)

MAX_NUM_SEQS = Flag(
    *("--max-num-seqs", "N", _at_least_one, "requests a server admits at once; more wait"), default=64
)
MAX_BATCH_TOKENS = Flag(
    *("--max-batch-tokens", "TOKENS", _at_least_one),
    "most tokens of one step, drafts included; longer prompts run in chunks",
    default=2048,
)
BLOCK_SIZE = Flag(
    *("--block-size", "TOKENS", _at_least_one, "tokens a KV block holds; the same on all servers"), default=16
)
CACHE_MEMORY = Flag(
    *("--cache-memory", "GIB", positive("GiB"), "a server's memory for KV blocks and recurrent states"),
    default_text="1 on a CPU, 85 % of what is free on a GPU",
    setting="cache_memory_bytes",
)

KV_CACHE_DTYPE = Flag(
    *("--kv-cache-dtype", "auto|fp8|fp8_e4m3", one_of("auto", "fp8", "fp8_e4m3")),
    "what keys and values are cached in; auto: --dtype; fp8, or fp8_e4m3: a byte each. Equal on all servers",
    default="auto",
)
SSM_CACHE_DTYPE = Flag(
    *("--mamba-ssm-cache-dtype", "auto|float32|bfloat16", one_of("auto", "float32", "bfloat16")),
    "what recurrent states are kept in; auto: what the checkpoint names, else float32. Equal on all servers",
    default="auto",
)
STOCHASTIC_ROUNDING = Flag(
    *("--enable-mamba-cache-stochastic-rounding", "", yes_or_no),
    "round states of 16 bits up or down by chance, so that errors don't add up. Equal on all servers",
    default=False,
    default_text="off",
    is_switch=True,
    setting="mamba_cache_stochastic_rounding",
)
CACHE_MODE = Flag(
    *("--cache-mode", "none|align|all", one_of("none", "align", "all")),
    "which recurrent states are kept for later prompts: none; those where a chunk ends on a block boundary; "
    "all at every state-block boundary, written by the scan itself",
    default="all",
)
STATE_BLOCK_SIZE = Flag(
    *("--state-block-size", "TOKENS", _at_least_one),
    "tokens between two states that mode all keeps; a multiple of --block-size",
    default_text="512, rounded up to a multiple of --block-size",
)
CACHED_STATES = Flag(
    *("--cached-states", "N", integer(0)),
    "memory for so many states beyond those of running requests",
    default_text="two a sequence; none in mode none",
)

SPECULATIVE = Flag(
    *("--speculative", "K", integer(0, 15)),
    "tokens drafted a step; each keeps a state of its own. The same on all servers: the KV of MTP layers "
    "comes from the prefill server",
    default=0,
    setting="num_speculative",
)
DRAFTER = Flag(
    *("--drafter", "mtp|ngram", one_of("mtp", "ngram")),
    "who drafts: the checkpoint's MTP layers, or a look-up of what followed the last tokens earlier",
    default_text="mtp where the checkpoint has MTP layers, else ngram",
)
NGRAM_MIN = Flag(
    *("--ngram-min", "TOKENS", _at_least_one, "fewest tokens that drafter ngram has to find again"), default=2
)
NGRAM_MAX = Flag(
    *("--ngram-max", "TOKENS", _at_least_one, "most tokens that drafter ngram looks for"), default=4
)
STEPS_AHEAD = Flag(
    *("--steps-ahead", "0|1", integer(0, 1), "steps launched before the last one's tokens are read back"),
    default_text="1 on a GPU, 0 on a CPU",
)

METRICS_PORT = Flag(
    *(
        "--metrics-port",
        "PORT|off",
        port_or_off,
        "port of HTTP /metrics, /healthz and /readyz; 0 or off: none",
    ),
    default_text="--port + 10000",
)
PROBE_PORT = Flag(
    *("--probe-port", "PORT|off", port_or_off),
    "port of HTTP /readyz and /healthz that speak for all ranks of this host; 0 or off: none",
    default=0,
    default_text="none",
)
METRICS_PORTS = Flag(
    *("--metrics-port", "PORT|off", port_or_off),
    "port of the first server's HTTP /metrics, /healthz and /readyz; those of the others follow, prefill "
    "servers first. 0 or off: none",
    default_text="any free ports; the status file has them",
)

OTLP_ENDPOINT = Flag(
    *("--otlp-endpoint", "URL", http_url),
    "OpenTelemetry collector that gets traces by OTLP: http://host:4318, or with "
    "OTEL_EXPORTER_OTLP_PROTOCOL=grpc http://host:4317",
    default_text="what OTEL_EXPORTER_OTLP_ENDPOINT says, else no traces",
)
TRACES = FlagGroup("traces", (OTLP_ENDPOINT,))

LEASE_TTL = Flag(
    *("--lease-ttl", "SECONDS", _seconds),
    "how long a prefill server keeps a finished prompt's state for a decode server to read",
    default=120.0,
    setting="lease_ttl_s",
)
ADVERTISE_HOST = Flag(
    *("--advertise-host", "HOST", some_text, "host by which other servers reach this one"),
    default_text="--host",
)
TRANSFER_DEADLINE = Flag(
    *("--transfer-deadline", "SECONDS", _seconds, "when a decode server gives up reading a prompt's state"),
    default=30.0,
    setting="transfer_deadline_s",
)

LOCAL_PREFILL = Flag(
    *("--local-prefill", "", yes_or_no),
    "a decode server runs a prompt itself when no prefill server can, instead of failing the request",
    default=False,
    default_text="off",
    is_switch=True,
)


KEY_NAME = Flag("--key-name", "NAME", some_text, "whose key it is, in metrics and in the admin API")
KEYS_FILE = Flag(
    *("--api-keys-file", "FILE", file_path, "the file to add it to; made if it is not there"),
    default_text="none: the line is shown",
)
MIN_PRIORITY = Flag(
    *("--min-priority", "N", integer(-(2**31) + 1, 2**31 - 1)),
    "the earliest priority that its requests may ask for (lower is earlier)",
    default_text="any",
)

NUM_PREFILL = Flag(*("--prefill", "N", integer(1, 64), "prefill servers to start"), default=1)
NUM_DECODE = Flag(*("--decode", "N", integer(1, 64), "decode servers to start"), default=1)
START_TIMEOUT = Flag(
    *("--start-timeout", "SECONDS", _seconds, "what a process may take to become ready"), default=600.0
)
STATUS_FILE = Flag(
    *("--status-file", "FILE", file_path),
    "JSON with URL, addresses and pids, written once all is ready and after each restart",
)

ROLE = Flag(
    *("--role", "decode|both", one_of("decode", "both")),
    "both: runs prompts itself and needs no prefill server",
    default="decode",
)

PLAN_ROLE = Flag(
    *("--role", "prefill|decode|both", one_of("prefill", "decode", "both"), "of the server"), default="decode"
)
GPU_MEMORY = Flag(
    *("--gpu-memory", "GIB", positive("GiB"), "memory of the server's GPU"),
    default_text="none: a server on a CPU",
)
GPU_TFLOPS = Flag(
    *("--gpu-tflops", "TFLOP/S", positive("TFLOP/s"), "what matrix products reach on the GPU in --dtype")
)
GPU_BANDWIDTH = Flag(
    *("--gpu-bandwidth", "GB/S", positive("GB/s"), "what copies in the GPU's memory reach, read and written")
)
LINK_BANDWIDTH = Flag(
    *("--link-bandwidth", "GB/S", positive("GB/s"), "what reads from another server's memory reach"),
    default=20.0,
)
PROMPT_TOKENS = Flag(*("--prompt-tokens", "TOKENS", _at_least_one, "mean prompt"), default=1000)
ANSWER_TOKENS = Flag(*("--answer-tokens", "TOKENS", _at_least_one, "mean answer"), default=200)
TTFT = Flag(*("--ttft", "SECONDS", _seconds, "first token's objective, for 90% of all requests"), default=0.5)
TPOT = Flag(
    *("--tpot", "SECONDS", _seconds, "objective of the time between two tokens, for 90% of all requests"),
    default=0.025,
)
SERVERS = Flag(
    *("--servers", "N", integer(2, 1024), "prefill and decode servers together, to be divided"), default=8
)
JSON = Flag(
    *("--json", "", yes_or_no, "print JSON, in bytes, instead of a table"),
    is_switch=True,
)

LISTEN = Flag(
    *("--listen", "", yes_or_no),
    "lend memory to the other side and answer until stopped",
    default=False,
    default_text="off",
    is_switch=True,
)
PEER = Flag(*("--peer", "HOST:PORT", address, "the side that listens"))

DRAINED_SERVER = Flag(
    *("--server", "HOST:PORT", addresses),
    "a server's gRPC address, or HOST:FIRST-LAST for those on all of these ports; repeat for more",
    repeatable=True,
)
DRAIN_TIMEOUT = Flag(
    *("--timeout", "SECONDS", _seconds, "when to give up; servers go on draining"), default=120.0
)

BENCHMARK = Flag(*("--benchmark", "NAME", only("transfer"), "what to measure"), default="transfer")
PROMPT_LENS = Flag(
    *("--prompt-len", "TOKENS", _at_least_one, "a prompt length to measure; repeat for more"),
    repeatable=True,
    default_text="16, 256, 1024, 4096 and 16384",
)
ROUNDS = Flag(*("--rounds", "N", _at_least_one, "handoffs of each length; medians are shown"), default=60)

SANITIZE = Flag(
    *("--sanitize", "", yes_or_no),
    "check in every step that each request reads its own blocks and state; for tests and for hunting faults",
    default=False,
    default_text="off",
    is_switch=True,
)


LOG_LEVEL = Flag(
    *("--log-level", "debug|info|warning|error", one_of("debug", "info", "warning", "error")),
    "least level that is logged",
    default="info",
)
NAME = Flag("--name", "NAME", some_text, "this process in log lines", default_text="the command")


def host(what: str) -> Flag:
    return Flag("--host", "HOST", some_text, f"address that {what} listens on", default="127.0.0.1")


def port(what: str, default: int) -> Flag:
    return Flag("--port", "PORT", _port, f"port that {what} listens on; 0: any free one", default=default)


THREADS = Flag(
    *("--threads", "N", integer(1, 1024), "CPU threads of one server's rank"),
    default_text="all cores this process may use, divided among the server's ranks",
    setting="num_threads",
)

NICE = Flag(
    *("--nice", "N", integer(0, 19), "niceness of the threads that compute: they step back for others"),
    default=0,
    setting="niceness",
)

MODEL_FLAGS = FlagGroup("model", (MODEL, SERVED_MODEL_NAME, LOAD_FORMAT, DTYPE, DEVICE, MAX_MODEL_LEN))
CAPACITY = (
    rank_flags.TENSOR_PARALLEL,
    MAX_NUM_SEQS,
    MAX_BATCH_TOKENS,
    BLOCK_SIZE,
    CACHE_MEMORY,
    KV_CACHE_DTYPE,
    SSM_CACHE_DTYPE,
    STOCHASTIC_ROUNDING,
    CACHE_MODE,
    STATE_BLOCK_SIZE,
    CACHED_STATES,
)
SPECULATION = (SPECULATIVE, DRAFTER, NGRAM_MIN, NGRAM_MAX)
DECODING = FlagGroup("decoding", (*SPECULATION, STEPS_AHEAD))
LOGS = FlagGroup("logs", (LOG_LEVEL, NAME))

CHECKS = FlagGroup("checks", (SANITIZE,))

PLAN_FLAGS = FlagGroup("server", (PLAN_ROLE, GPU_MEMORY, *CAPACITY, *rank_flags.RANKS, *SPECULATION))
PLAN_SPEED = FlagGroup(
    "speed, computed if both of the GPU's rates are given",
    (GPU_TFLOPS, GPU_BANDWIDTH, LINK_BANDWIDTH, PROMPT_TOKENS, ANSWER_TOKENS, TTFT, TPOT, SERVERS),
)
