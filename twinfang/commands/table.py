"""The commands: what each is for, its flags, an example, and the function that prepares it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping

from twinfang.autoscale import flags as autoscale
from twinfang.batch import flags as batch
from twinfang.cache_sim import flags as cache_sim
from twinfang.commands.api_key import prepare as prepare_api_key
from twinfang.commands.command import Command, prepared_by
from twinfang.commands.purge import PURGE
from twinfang.commands.read_ahead import read_ahead
from twinfang.commands.servers import (
    prepare_bench,
    prepare_check_network,
    prepare_decode,
    prepare_plan,
    prepare_prefill,
    prepare_router,
)
from twinfang.fetch import flags as fetch
from twinfang.flags import access, table, tls
from twinfang.flags import ranks as rank_flags
from twinfang.flags import router as router_flags
from twinfang.flags.file_cache import FILE_CACHE
from twinfang.flags.flag import FlagGroup
from twinfang.flags.host_cache import HOST_CACHE_SIZE, NEIGHBOUR_WAIT
from twinfang.talk import flags as talk
from wire.errors import ConfigError


def _prepare_up(values: argparse.Namespace) -> Callable[[], None]:
    return _prepare_stack(values, {"prefill": values.prefill, "decode": values.decode})


def _prepare_serve(values: argparse.Namespace) -> Callable[[], None]:
    return _prepare_stack(values, {"both": 1})


def _prepare_stack(values: argparse.Namespace, roles: Mapping[str, int]) -> Callable[[], None]:
    """Starts the fork server before anything else, if that was not done even earlier."""
    from twinfang.early_fork_server import FORK_SERVER, take_early
    from twinfang.forking.client import ForkServer
    from twinfang.stack.cores import may_use_gpu

    if values.tls:
        tls.speak_only_tls_1_3()  # before the fork server, which its forks have gRPC's settings from
    forks = None if may_use_gpu(values.device) else ForkServer.start(FORK_SERVER, take_early())
    if values.load_format == "auto":
        read_ahead(values.model)
    try:
        from twinfang.commands.up import prepare

        return prepare(values, roles, ROUTER.groups, forks)
    except BaseException:
        if forks is not None:
            forks.close()
        raise


def _prepare_batch(values: argparse.Namespace) -> Callable[[], None]:
    from twinfang.batch.command import prepare
    from twinfang.commands.up import own_stack

    if values.base_url is not None:
        _refuse_stack_flags(values)
    return prepare(values, lambda: own_stack(values, ROUTER.groups))


def _refuse_stack_flags(values: argparse.Namespace) -> None:
    """Raises :class:`ConfigError` for a flag that says how to start a stack where none is started. Variables
    of the environment may be there for other commands."""
    for flag in (flag for group in _BATCH_STACK for flag in group.flags):
        if not os.environ.get(flag.variable) and getattr(values, flag.dest) != (
            () if flag.repeatable else flag.default
        ):
            raise ConfigError(
                f"{flag.name} is for a stack that the batch starts, and --base-url names a running one: "
                "leave one of the two out"
            )


_CAPACITY = (*table.CAPACITY, HOST_CACHE_SIZE, *FILE_CACHE)
_ROUTER_ADDRESS = (table.host("the router"), table.port("the router", 8000))
_STACK_GROUP = FlagGroup(
    "stack", (*_ROUTER_ADDRESS, table.METRICS_PORTS, table.START_TIMEOUT, table.STATUS_FILE, tls.TLS)
)

UP = Command(
    "up",
    "prefill servers, decode servers and a router, all on this machine",
    "Starts prefill and decode servers on free loopback ports and a router in front of them, prints the URL "
    "once all are ready, restarts a process that dies, and stops all of them on Ctrl-C or SIGTERM.\n\n"
    "Servers that share one GPU need --cache-memory: by default each takes 85 % of the memory it finds free.",
    (
        FlagGroup("stack", (table.NUM_PREFILL, table.NUM_DECODE, *_STACK_GROUP.flags)),
        table.MODEL_FLAGS,
        FlagGroup(
            "each server's capacity",
            (*_CAPACITY, rank_flags.PREFILL_TENSOR_PARALLEL, *rank_flags.RANKS, table.THREADS),
        ),
        table.DECODING,
        FlagGroup(
            "handoff",
            (
                *(table.LEASE_TTL, table.TRANSFER_DEADLINE, table.LOCAL_PREFILL, table.VERIFY_HANDOFFS),
                NEIGHBOUR_WAIT,
            ),
        ),
        table.CHECKS,
        FlagGroup("router", router_flags.ROUTER_LIMITS),
        table.TRACES,
        table.LOGS,
    ),
    "twinfang up --prefill 1 --decode 2 --model ~/models/nemotron-h --cache-memory 8",
    _prepare_up,
)

SERVE = Command(
    "serve",
    "one server that both prefills and decodes, and a router",
    "Starts one server that has both roles, behind the same router. This is the monolithic arrangement: no "
    "state is handed over. `twinfang up` is compared with it.",
    (
        _STACK_GROUP,
        table.MODEL_FLAGS,
        FlagGroup("the server's capacity", (*_CAPACITY, *rank_flags.RANKS, table.THREADS)),
        table.DECODING,
        table.CHECKS,
        FlagGroup("router", router_flags.ROUTER_LIMITS),
        table.TRACES,
        table.LOGS,
    ),
    "twinfang serve --port 8001 --model ~/models/nemotron-h",
    _prepare_serve,
)

PREFILL = Command(
    "prefill",
    "one prefill server",
    "Runs one prefill server: it computes all tokens of a prompt except the last one, and keeps blocks and "
    "state until a decode server has read them.",
    (
        FlagGroup(
            "server",
            (
                table.host("the server"),
                table.port("the server", 8100),
                table.ADVERTISE_HOST,
                table.METRICS_PORT,
                table.VLLM_METRICS,
            ),
        ),
        table.MODEL_FLAGS,
        FlagGroup("capacity", (*_CAPACITY, table.THREADS, table.NICE)),
        FlagGroup("hosts", rank_flags.NODES),
        table.DECODING,
        FlagGroup("handoff", (table.LEASE_TTL, table.VERIFY_HANDOFFS, NEIGHBOUR_WAIT)),
        tls.MUTUAL_TLS,
        table.CHECKS,
        table.TRACES,
        table.LOGS,
    ),
    "twinfang prefill --host 0.0.0.0 --advertise-host 10.0.0.5 --model /models/nemotron-h",
    prepare_prefill,
)

DECODE = Command(
    "decode",
    "one decode server",
    "Runs one decode server: it reads blocks and state from prefill servers and generates the answers.",
    (
        FlagGroup(
            "server",
            (
                table.host("the server"),
                table.port("the server", 8200),
                table.ADVERTISE_HOST,
                table.METRICS_PORT,
                table.VLLM_METRICS,
                table.PROBE_PORT,
                table.ROLE,
            ),
        ),
        table.MODEL_FLAGS,
        FlagGroup("capacity", (*_CAPACITY, table.THREADS, table.NICE)),
        FlagGroup("hosts", rank_flags.NODES),
        FlagGroup("ranks", (*rank_flags.RANKS, *rank_flags.RANK_PLACE)),
        table.DECODING,
        FlagGroup("handoff", (table.TRANSFER_DEADLINE, table.LOCAL_PREFILL, table.VERIFY_HANDOFFS)),
        tls.MUTUAL_TLS,
        table.CHECKS,
        table.TRACES,
        table.LOGS,
    ),
    "twinfang decode --host 10.0.0.6 --model /models/nemotron-h",
    prepare_decode,
)

ROUTER = Command(
    "router",
    "the OpenAI-compatible router",
    "Runs one router: it offers OpenAI's HTTP API to clients and pairs prefill and decode servers. It reads "
    "tokenizers and chat templates of its models, not their weights. If there are several models, each is "
    "served by the servers that were started with its name as --served-model-name.",
    (
        FlagGroup(
            "router",
            (
                *_ROUTER_ADDRESS,
                router_flags.PREFILL_ADDRESSES,
                router_flags.DECODE_ADDRESSES,
                *router_flags.ROUTER_LIMITS,
                router_flags.PLACE,
            ),
        ),
        FlagGroup("servers that are pods", router_flags.DISCOVERY),
        FlagGroup("models", (router_flags.MODELS, table.SERVED_MODEL_NAME)),
        tls.MUTUAL_TLS,
        table.TRACES,
        table.LOGS,
    ),
    "twinfang router --model /models/nemotron-h --prefill 10.0.0.5:8100 --decode 10.0.0.6:8200",
    prepare_router,
)

PLAN = Command(
    "plan",
    "what fits into a GPU's memory",
    "Shows how a server of one role would divide a GPU's memory between weights, recurrent states and KV "
    "blocks. It reads only config.json, so it needs neither weights nor a GPU. If the server does not fit, "
    "the command says how much memory is missing and which values would fit, and exits with 1.\n\n"
    "If --gpu-tflops and --gpu-bandwidth are given, it also computes how many requests per second prefill "
    "and decode servers take within an objective, and how to divide servers between the two roles. These "
    "figures are computed from a model, not measured.",
    (
        FlagGroup("model", (table.MODEL, table.DTYPE, table.WEIGHT_DTYPE, table.MAX_MODEL_LEN)),
        table.PLAN_FLAGS,
        FlagGroup("host memory and files", (HOST_CACHE_SIZE, *FILE_CACHE)),
        table.PLAN_SPEED,
        FlagGroup("output", (table.JSON,)),
        table.LOGS,
    ),
    "twinfang plan /models/nemotron-h --gpu-memory 80 --max-num-seqs 64",
    prepare_plan,
    arguments=(table.MODEL,),
)

CACHE_SIM = Command(
    "cache-sim",
    "which cache policy and which memory pay for a log of prompts",
    "Replays a log of prompt hashes against cache policies and budgets, with a server's own prefix cache and "
    "the sizes and costs of the model. It says how many prompt tokens hit, the FLOP saved, and the time to "
    "the first token of a prompt that is computed alone, all computed and not measured. It reads only "
    "config.json, and needs neither weights nor a GPU.",
    (
        cache_sim.LOG,
        FlagGroup("model", (table.MODEL, table.DTYPE)),
        cache_sim.CACHE,
        cache_sim.DEVICE,
        FlagGroup("output", (table.JSON,)),
        table.LOGS,
    ),
    "twinfang cache-sim conversation_trace.jsonl --model /models/nemotron-h --budget 40 --budget 400",
    prepared_by("twinfang.cache_sim.command"),
    arguments=(cache_sim.TRACE,),
)

CHECK_NETWORK = Command(
    "check-network",
    "which transport two hosts use, how fast it is, what to set",
    "Reads memory of another process as a decode server reads a prompt's state. It reports which transport "
    "UCX picked, its bandwidth and latency, and what to set if both sides have a better transport.\n\n"
    "Run it with --listen on one side, then on the other side with the address of the first. Run it as the "
    "servers run: on the same hosts, in the same containers, as the same users, with the same UCX_* "
    "variables. It exits with 1 if a setting should be changed.\n\n"
    "With --nccl on both sides it checks what the ranks of one server use instead: NCCL between two GPUs, "
    "with the same NCCL_* variables. The side that listens then ends after one check.",
    (
        FlagGroup("sides", (table.LISTEN, table.PEER, table.NCCL)),
        FlagGroup("the side that listens", (table.host("this side"), table.port("this side", 8300))),
        FlagGroup("memory", (table.DEVICE,)),
        FlagGroup("output", (table.JSON,)),
        table.LOGS,
    ),
    "twinfang check-network 10.0.0.5:8300",
    prepare_check_network,
    arguments=(table.PEER,),
)

BENCH = Command(
    "bench",
    "how fast state moves from server to server",
    "`twinfang bench transfer` hands over prompts of several lengths between two processes of this "
    "machine. Blocks and states have the model's shapes. It compares each handoff with a raw NIXL read of "
    "as many bytes in one region, and with a copy of as many bytes within one process. The three take "
    "turns. The results are medians.",
    (
        FlagGroup("benchmark", (table.BENCHMARK, table.PROMPT_LENS, table.ROUNDS)),
        FlagGroup("model", (table.MODEL, table.DTYPE, table.BLOCK_SIZE)),
        FlagGroup("output", (table.JSON,)),
        table.LOGS,
    ),
    "twinfang bench transfer --prompt-len 4096 --model ~/models/nemotron-h",
    prepare_bench,
    arguments=(table.BENCHMARK,),
)

DRAIN = Command(
    "drain",
    "tell servers to take no new requests, and wait until they have none left",
    "Tells prefill or decode servers to drain, and waits. Routers send them no new requests. Prompts are "
    "computed and read to their end. Answers end on their server, or move to another decode server if "
    "their router knows that the pod of their server is being deleted. Several servers drain at the same "
    "time.\n\n"
    "Run it before SIGTERM: in a preStop hook, or in ExecStop of a unit. It exits with 1 if "
    "requests or leases are left after --timeout. To undo it, undrain the server through the admin API, or "
    "restart the server.",
    (FlagGroup("server", (table.DRAINED_SERVER, table.DRAIN_TIMEOUT)), tls.MUTUAL_TLS, table.LOGS),
    "twinfang drain 127.0.0.1:8200 --timeout 300",
    prepared_by("twinfang.commands.drain"),
    arguments=(table.DRAINED_SERVER,),
)

API_KEY = Command(
    "api-key",
    "make an API key",
    "Makes a key, shows it once, and adds its hash to the file that routers read with --api-keys-file. The "
    "routers accept the key within about a second. To revoke a key, delete its line. Requests send the key "
    "as Authorization: Bearer KEY. Several keys may have the same name; they share this name's part of the "
    "servers when requests have to wait, and what they have used of their limits.",
    (
        FlagGroup("key", (*table.KEY, access.AUDIT_LOG)),
        FlagGroup("limits", table.KEY_LIMITS),
        table.LOGS,
    ),
    "twinfang api-key alice --api-keys-file /etc/twinfang/keys",
    prepare_api_key,
    arguments=(table.KEY_NAME,),
)

AUDIT = Command(
    "audit",
    "check a router's audit log",
    "`twinfang audit verify FILE` names the first line of an audit log (--audit-log) that was changed, "
    "removed or moved, and ends with 1 if there is one.",
    (FlagGroup("log", (access.AUDIT_ACTION, access.AUDIT_FILES, access.EXPECTED_LINE)), table.LOGS),
    "twinfang audit verify /var/log/twinfang/audit.jsonl",
    prepared_by("twinfang.commands.audit"),
    arguments=(access.AUDIT_ACTION, access.AUDIT_FILES),
)

AUTOSCALE = Command(
    "autoscale",
    "how many prefill and decode servers the load needs",
    "Repeatedly reads metrics of routers and servers, computes how many servers of each role meet the "
    "objectives, and prints one line for each decision. With --apply it scales the Deployments that the "
    "flags name; without --apply it changes nothing.",
    (
        autoscale.POOLS,
        autoscale.GOALS,
        autoscale.PACE,
        autoscale.TARGETS,
        FlagGroup("its own metrics page", (table.host("the autoscaler"), autoscale.METRICS_PORT)),
        tls.MUTUAL_TLS,
        table.LOGS,
    ),
    "twinfang autoscale --router-metrics http://router:8000/metrics "
    "--prefill-metrics http://prefill:18100/metrics --decode-metrics http://decode:18200/metrics",
    prepared_by("twinfang.autoscale.command"),
)

FETCH_MODEL = Command(
    "fetch-model",
    "get a model's files from a hub, an object store or a folder",
    "Fetches the files that Twinfang reads of a model, several at a time. It continues where a connection "
    "was lost, also in a later call. It compares files with the checksums that the source has: a file "
    "SHA256SUMS, what a model hub says of its files, MD5 of S3's objects.\n\n"
    "DIR appears in one step, when all files are there. If it is there already, the source is not asked. "
    "Several processes may fetch to one DIR: one works, the others wait.",
    (
        FlagGroup("model", (fetch.SOURCE, fetch.DIRECTORY, fetch.WITHOUT_WEIGHTS)),
        FlagGroup("connection", (fetch.TOKEN_FILE, fetch.CONNECTIONS, fetch.TIMEOUT)),
        table.LOGS,
    ),
    "twinfang fetch-model https://models.example.com/nemotron-h/resolve/v1 /models/nemotron-h",
    prepared_by("twinfang.fetch.command"),
    arguments=(fetch.SOURCE, fetch.DIRECTORY),
)

_BATCH_STACK = (
    FlagGroup("a stack of its own", (batch.NUM_PREFILL, batch.NUM_DECODE, table.START_TIMEOUT)),
    *UP.groups[1:-1],
)
BATCH = Command(
    "batch",
    "answer a file of requests",
    "Answers the requests of a file in OpenAI's batch format, on a stack that it starts and stops itself, or "
    "on any OpenAI endpoint (--base-url). Answers and errors go to files in OpenAI's format, in the order in "
    "which they come.\n\n"
    "If it is stopped or killed, the same command continues: no line is lost, and none is answered twice. It "
    "ends with 0 when every line has an answer or an error, and with 3 if lines are left.",
    (batch.FILES, batch.ENDPOINT, batch.SENDING, *_BATCH_STACK, batch.LOGS),
    "twinfang batch requests.jsonl --output answers.jsonl --model ~/models/nemotron-h",
    _prepare_batch,
    arguments=(batch.INPUT,),
)

CHAT = Command(
    "chat",
    "chat with a model of any OpenAI endpoint",
    "Sends messages to an OpenAI endpoint, by default `twinfang up` on this machine, and shows the answers "
    "while they come; what the model thinks is dimmed. Ctrl-C ends an answer, /reset forgets what was said, "
    "/exit ends the chat. With --message, or with a file or pipe as stdin, it answers one message and ends.",
    (talk.ENDPOINT, talk.CHAT, talk.CHAT_SAMPLING, talk.LOGS),
    "twinfang chat --system 'Answer in one sentence.' --temperature 0",
    prepared_by("twinfang.talk.command", "prepare_chat"),
    arguments=(talk.MESSAGE,),
)

COMPLETE = Command(
    "complete",
    "have a model of any OpenAI endpoint continue texts",
    "Sends texts to an OpenAI endpoint, by default `twinfang up` on this machine, and shows how the model "
    "continues them. Ctrl-C ends an answer. With --prompt, or with a file or pipe as stdin, it continues one "
    "text and ends.",
    (talk.ENDPOINT, talk.COMPLETE, talk.COMPLETE_SAMPLING, talk.LOGS),
    "twinfang complete 'def fibonacci(n):' --max-tokens 64 --temperature 0",
    prepared_by("twinfang.talk.command", "prepare_complete"),
    arguments=(talk.PROMPT,),
)

COMMANDS = (
    *(UP, SERVE, PREFILL, DECODE, ROUTER, PLAN, CACHE_SIM),
    *(CHECK_NETWORK, DRAIN, AUTOSCALE, BENCH, API_KEY, AUDIT, FETCH_MODEL),
    *(PURGE, BATCH, CHAT, COMPLETE),
)
