"""Flags of the commands, except those of the router (flags/router.py), of ranks (flags/ranks.py) and those
that only ``autoscale`` has (autoscale/flags.py).

The defaults repeat those of the configuration classes, which import torch. A test compares both.
"""

from __future__ import annotations

from pathlib import Path

from twinfang.flags import ranks as rank_flags
from twinfang.flags.flag import Flag, FlagGroup
from twinfang.flags.speculation import SPECULATION
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
    zero_or_more,
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
    *("--served-model-name", "NAME", some_text, "the model's name for clients"),
    default_text="the directory's name",
)
LOAD_FORMAT = Flag(
    *("--load-format", "auto|dummy", one_of("auto", "dummy")),
    "auto: the directory's safetensors; dummy: random weights, made on the device from config.json alone, to "
    "measure speed",
    default="auto",
)
DTYPE = Flag(
    *("--dtype", "auto|float32|bfloat16", one_of("auto", "float32", "bfloat16")),
    "data type of weights, KV and convolution states; auto: float32 on a CPU, the checkpoint's on a GPU",
    default="auto",
)
WEIGHT_DTYPE = Flag(
    *("--weight-dtype", "auto|float32|bfloat16|int8", one_of("auto", "float32", "bfloat16", "int8")),
    "data type in which a CPU keeps the weights of linear layers, while sums stay float32; bfloat16 and int8 "
    "round, auto: bfloat16 where no weight is rounded. Equal on all servers",
    default="auto",
)
DEVICE = Flag(
    *(
        "--device",
        "auto|cpu|cuda",
        one_of("auto", "cpu", "cuda"),
        "auto: a GPU if there is one, else the CPU",
    ),
    default="auto",
)
MAX_MODEL_LEN = Flag(
    *("--max-model-len", "TOKENS", _at_least_one, "most tokens of a prompt and its answer together"),
    default_text="the checkpoint's limit",
)

MAX_NUM_SEQS = Flag(
    *("--max-num-seqs", "N", _at_least_one, "most requests a server runs at once; more wait"), default=64
)
MAX_BATCH_TOKENS = Flag(
    *("--max-batch-tokens", "TOKENS", _at_least_one),
    "most tokens of one step, drafts included; longer prompts run in chunks",
    default=2048,
)
LONG_PREFILL_THRESHOLD = Flag(
    *("--long-prefill-threshold", "TOKENS", _at_least_one),
    "a prompt of which more tokens are missing leaves up to half of a step to shorter prompts behind it",
    default_text="--max-batch-tokens",
)
BLOCK_SIZE = Flag(
    *("--block-size", "TOKENS", _at_least_one, "tokens per KV block; the same on all servers"), default=16
)
CACHE_MEMORY = Flag(
    *("--cache-memory", "GIB", positive("GiB"), "a server's memory for KV blocks and recurrent states"),
    default_text="1 on a CPU, at most 85 % of what is free on a GPU",
    setting="cache_memory_bytes",
)

KV_CACHE_DTYPE = Flag(
    *("--kv-cache-dtype", "auto|fp8|fp8_e4m3", one_of("auto", "fp8", "fp8_e4m3")),
    "data type of cached keys and values; auto: --dtype; fp8 or fp8_e4m3: one byte per value. Equal on all "
    "servers",
    default="auto",
)
SSM_CACHE_DTYPE = Flag(
    *("--mamba-ssm-cache-dtype", "auto|float32|bfloat16", one_of("auto", "float32", "bfloat16")),
    "data type of recurrent states; auto: the one the checkpoint names, else float32. Equal on all servers",
    default="auto",
)
STOCHASTIC_ROUNDING = Flag(
    *("--enable-mamba-cache-stochastic-rounding", "", yes_or_no),
    "round states of 16 bits up or down at random, so that errors don't add up. Equal on all servers",
    default=False,
    default_text="off",
    is_switch=True,
    setting="mamba_cache_stochastic_rounding",
)
BATCH_INVARIANT = Flag(
    *("--batch-invariant", "", yes_or_no),
    "compute each row in the same order in every batch, so that GPUs give the same tokens alone, in a batch, "
    "on one server and on two. Slower; equal on all servers",
    default=False,
    default_text="off",
    is_switch=True,
)
CACHE_MODE = Flag(
    *("--cache-mode", "none|align|all", one_of("none", "align", "all")),
    "which recurrent states are kept for later prompts; none: no states; align: the states where a chunk "
    "ends on a block boundary; all: the states where later prompts are expected to start, or at fixed "
    "distances with --state-block-size",
    default="all",
)
CACHE_POLICY = Flag(
    *("--cache-policy", "lru|value", one_of("lru", "value")),
    "what is given up if the memory is full; lru: what was used least recently; value: what saves least for "
    "its bytes. With value, --cache-mode all keeps states where prompts are expected to start",
    default="value",
)
STATE_BLOCK_SIZE = Flag(
    *("--state-block-size", "TOKENS", _at_least_one),
    "tokens between two states that --cache-mode all keeps; a multiple of --block-size. With --cache-policy "
    "value: fixed places in prompts, instead of learned ones",
    default_text="512, rounded up to a multiple of --block-size",
)
CACHED_STATES = Flag(
    *("--cached-states", "N", integer(0)),
    "number of states, beyond those of running requests, to reserve memory for",
    default_text="two per sequence; 0 with --cache-mode none",
)

STEPS_AHEAD = Flag(
    *("--steps-ahead", "0|1", integer(0, 1), "steps launched before the last step's tokens are read back"),
    default_text="1 on a GPU, 0 on a CPU",
)
STREAM_INTERVAL = Flag(
    *("--stream-interval", "SECONDS", zero_or_more("seconds")),
    "for how long short decode steps may follow each other before their tokens are sent together; 0: each "
    "step's tokens are sent at once",
    default_text="0.025 on a CPU with one rank, else 0",
    setting="stream_interval_s",
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
VLLM_METRICS = Flag(
    *("--vllm-metrics", "", yes_or_no),
    "show metrics under vLLM's names too, for dashboards and endpoint pickers that read those",
    default=False,
    default_text="off",
    is_switch=True,
)
PROBE_PORT = Flag(
    *("--probe-port", "PORT|off", port_or_off),
    "port of HTTP /readyz and /healthz that answer for all ranks of this host; 0 or off: none",
    default=0,
    default_text="none",
)
METRICS_PORTS = Flag(
    *("--metrics-port", "PORT|off", port_or_off),
    "port of the first server's HTTP /metrics, /healthz and /readyz; the other servers use the next ports, "
    "prefill servers first. 0 or off: none",
    default_text="any free ports; the status file names them",
)

OTLP_ENDPOINT = Flag(
    *("--otlp-endpoint", "URL", http_url),
    "OpenTelemetry collector to which traces are sent by OTLP: http://host:4318, or http://host:4317 with "
    "OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
    default_text="the value of OTEL_EXPORTER_OTLP_ENDPOINT, else no traces",
)
TRACES = FlagGroup("traces", (OTLP_ENDPOINT,))

LEASE_TTL = Flag(
    *("--lease-ttl", "SECONDS", _seconds),
    "how long a prefill server keeps a finished prompt's state for a decode server to read",
    default=120.0,
    setting="lease_ttl_s",
)
ADVERTISE_HOST = Flag(
    *("--advertise-host", "HOST", some_text, "host name or address at which other servers reach this one"),
    default_text="--host",
)
TRANSFER_DEADLINE = Flag(
    *("--transfer-deadline", "SECONDS", _seconds, "longest time a decode server reads a prompt's state"),
    default=30.0,
    setting="transfer_deadline_s",
)
VERIFY_HANDOFFS = Flag(
    *("--verify-handoffs", "off|quick|all", one_of("off", "quick", "all")),
    "handoffs with digests that their readers compare; quick: those that this delays by 0.1 ms at most",
    default="quick",
)

LOCAL_PREFILL = Flag(
    *("--local-prefill", "", yes_or_no),
    "a decode server runs a prompt itself if no prefill server can, instead of failing the request",
    default=False,
    default_text="off",
    is_switch=True,
)


KEY_NAME = Flag("--key-name", "NAME", some_text, "name of the key's owner in metrics and in the admin API")
KEYS_FILE = Flag(
    *("--api-keys-file", "FILE", file_path, "file to add the key to; created if it does not exist"),
    default_text="none: the line for such a file is printed",
)
MIN_PRIORITY = Flag(
    *("--min-priority", "N", integer(-(2**31) + 1, 2**31 - 1)),
    "earliest priority that requests with this key may ask for (lower is earlier)",
    default_text="any",
)

KEY_ROLE = Flag(
    *("--role", "view|operate|configure", one_of("view", "operate", "configure")),
    "what the key may do through the admin API, and whether it may read the figures of keys in /metrics",
    default_text="nothing",
)

KEY = (KEY_NAME, KEYS_FILE, MIN_PRIORITY, KEY_ROLE)

_limit = integer(1, 10**15)
KEY_LIMITS = (
    Flag(
        *("--requests-per-minute", "N", _limit, "how many requests the key may send in a minute"),
        default_text="any number",
    ),
    Flag(
        *(
            "--tokens-per-minute",
            "N",
            _limit,
            "how many tokens of prompts and answers it may use in a minute",
        ),
        default_text="any number",
    ),
    Flag(
        *("--tokens-per-day", "N", _limit, "the same for a day, which begins at midnight, UTC"),
        default_text="any number",
    ),
    Flag(*("--tokens-per-month", "N", _limit, "the same for a calendar month"), default_text="any number"),
    Flag(*("--tokens-total", "N", _limit, "how many tokens it may ever use"), default_text="any number"),
)

NUM_PREFILL = Flag(*("--prefill", "N", integer(1, 64), "number of prefill servers to start"), default=1)
NUM_DECODE = Flag(*("--decode", "N", integer(1, 64), "number of decode servers to start"), default=1)
START_TIMEOUT = Flag(
    *("--start-timeout", "SECONDS", _seconds, "time within which a process must become ready"), default=600.0
)
STATUS_FILE = Flag(
    *("--status-file", "FILE", file_path),
    "JSON file for URL, addresses and pids, written when all processes are ready and after each restart",
)

ROLE = Flag(
    *("--role", "decode|both", one_of("decode", "both")),
    "both: the server runs prompts itself and needs no prefill server",
    default="decode",
)

PLAN_ROLE = Flag(
    *("--role", "prefill|decode|both", one_of("prefill", "decode", "both"), "role of the server"),
    default="decode",
)
GPU_MEMORY = Flag(
    *("--gpu-memory", "GIB", positive("GiB"), "memory of the server's GPU"),
    default_text="none: a server on a CPU",
)
GPU_TFLOPS = Flag(
    *("--gpu-tflops", "TFLOP/S", positive("TFLOP/s"), "rate that matrix products reach on the GPU in --dtype")
)
GPU_BANDWIDTH = Flag(
    *("--gpu-bandwidth", "GB/S", positive("GB/s"), "rate of copies in the GPU's memory, read plus written")
)
LINK_BANDWIDTH = Flag(
    *("--link-bandwidth", "GB/S", positive("GB/s"), "rate at which another server's memory is read"),
    default=20.0,
)
PROMPT_TOKENS = Flag(*("--prompt-tokens", "TOKENS", _at_least_one, "mean length of a prompt"), default=1000)
ANSWER_TOKENS = Flag(*("--answer-tokens", "TOKENS", _at_least_one, "mean length of an answer"), default=200)
TTFT = Flag(
    *("--ttft", "SECONDS", _seconds, "objective for the time to the first token, for 90% of all requests"),
    default=0.5,
)
TPOT = Flag(
    *("--tpot", "SECONDS", _seconds, "objective for the time between two tokens, for 90% of all requests"),
    default=0.025,
)
SERVERS = Flag(
    *("--servers", "N", integer(2, 1024), "number of servers to divide between prefill and decode"), default=8
)
JSON = Flag(
    *("--json", "", yes_or_no, "print JSON instead of a table, with sizes in bytes"),
    is_switch=True,
)

LISTEN = Flag(
    *("--listen", "", yes_or_no),
    "offer memory that the other side reads, and answer until stopped",
    default=False,
    default_text="off",
    is_switch=True,
)
NCCL = Flag(
    *("--nccl", "", yes_or_no),
    "sum tensors of two GPUs by NCCL, as the ranks of one server do, instead of reading memory",
    default=False,
    default_text="off",
    is_switch=True,
)
PEER = Flag(*("--peer", "HOST:PORT", address, "address of the side that listens"))

DRAINED_SERVER = Flag(
    *("--server", "HOST:PORT", addresses),
    "a server's gRPC address, or HOST:FIRST-LAST for the servers on all of these ports; repeat for more",
    repeatable=True,
)
DRAIN_TIMEOUT = Flag(
    *("--timeout", "SECONDS", _seconds, "time to wait before giving up; servers continue to drain"),
    default=120.0,
)

BENCHMARK = Flag(*("--benchmark", "NAME", only("transfer"), "what to measure"), default="transfer")
PROMPT_LENS = Flag(
    *("--prompt-len", "TOKENS", _at_least_one, "a prompt length to measure; repeat for more"),
    repeatable=True,
    default_text="16, 256, 1024, 4096 and 16384",
)
ROUNDS = Flag(*("--rounds", "N", _at_least_one, "handoffs per prompt length; medians are shown"), default=60)

SANITIZE = Flag(
    *("--sanitize", "", yes_or_no),
    "check in every step that each request reads its own blocks and state; for tests and debugging",
    default=False,
    default_text="off",
    is_switch=True,
)
STEP_DEADLINE = Flag(
    *("--step-deadline", "SECONDS", zero_or_more("seconds")),
    "a step that takes longer shows that the GPU hangs, and the server ends; 0: steps may take any time",
    default_text="60 on a GPU, 0 on a CPU",
    setting="step_deadline_s",
)
HANG_DEADLINE = Flag(
    *("--hang-deadline", "SECONDS", zero_or_more("seconds")),
    "while a step takes longer, /healthz answers 503, so that a liveness probe has the server restarted; 0: "
    "steps may take any time",
    default=600.0,
    setting="hang_deadline_s",
)


LOG_LEVEL = Flag(
    *("--log-level", "debug|info|warning|error", one_of("debug", "info", "warning", "error")),
    "lowest level that is logged",
    default="info",
)
NAME = Flag("--name", "NAME", some_text, "this process's name in log lines", default_text="the command")


def host(what: str) -> Flag:
    return Flag("--host", "HOST", some_text, f"address that {what} listens on", default="127.0.0.1")


def port(what: str, default: int) -> Flag:
    return Flag("--port", "PORT", _port, f"port that {what} listens on; 0: any free one", default=default)


THREADS = Flag(
    *("--threads", "N", integer(1, 1024), "CPU threads of each rank of a server"),
    default_text="all cores that this process may use, divided among the server's ranks",
    setting="num_threads",
)

NICE = Flag(
    *("--nice", "N", integer(0, 19), "niceness of the compute threads; higher: other threads run first"),
    default=0,
    setting="niceness",
)

MODEL_FLAGS = FlagGroup(
    "model", (MODEL, SERVED_MODEL_NAME, LOAD_FORMAT, DTYPE, WEIGHT_DTYPE, DEVICE, MAX_MODEL_LEN)
)
CAPACITY = (
    rank_flags.TENSOR_PARALLEL,
    MAX_NUM_SEQS,
    MAX_BATCH_TOKENS,
    LONG_PREFILL_THRESHOLD,
    BLOCK_SIZE,
    CACHE_MEMORY,
    KV_CACHE_DTYPE,
    SSM_CACHE_DTYPE,
    STOCHASTIC_ROUNDING,
    BATCH_INVARIANT,
    CACHE_MODE,
    CACHE_POLICY,
    STATE_BLOCK_SIZE,
    CACHED_STATES,
)
DECODING = FlagGroup("decoding", (*SPECULATION, STEPS_AHEAD, STREAM_INTERVAL))
LOGS = FlagGroup("logs", (LOG_LEVEL, NAME))

CHECKS = FlagGroup("checks", (SANITIZE, STEP_DEADLINE, HANG_DEADLINE))

PLAN_FLAGS = FlagGroup("server", (PLAN_ROLE, GPU_MEMORY, *CAPACITY, *rank_flags.RANKS, *SPECULATION))
PLAN_SPEED = FlagGroup(
    "speed, computed if --gpu-tflops and --gpu-bandwidth are given",
    (GPU_TFLOPS, GPU_BANDWIDTH, LINK_BANDWIDTH, PROMPT_TOKENS, ANSWER_TOKENS, TTFT, TPOT, SERVERS),
)
