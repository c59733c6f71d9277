"""The flags of a router."""

from __future__ import annotations

from twinfang.flags.flag import Flag
from twinfang.flags.table import SERVED_MODEL_NAME
from twinfang.flags.values import (
    address,
    existing_file,
    file_path,
    integer,
    model_alias,
    model_source,
    one_of,
    positive,
    process_place,
    some_text,
    yes_or_no,
    zero_or_more,
)

_port = integer(0, 65535)
_at_least_one = integer(1)
_seconds = positive("seconds")

MODELS = Flag(
    *("--model", "[NAME=]DIR", model_source, "Hugging Face model directory; repeat for more models"),
    default_text="a small model that comes with Twinfang",
    repeatable=True,
)
ALIASES = Flag(
    *(
        "--alias",
        "NAME=MODEL",
        model_alias,
        "another name that clients may use for a model; repeat for more",
    ),
    repeatable=True,
)
MAX_REQUESTS_IN_FLIGHT = Flag(
    *("--max-requests-in-flight", "N", _at_least_one),
    "answers of one model under way at most, each of a request's n counted, and never more than its servers "
    "have room for; further requests wait",
    default=1024,
)
MAX_QUEUE = Flag(
    *("--max-queue", "N", integer(0), "requests that wait for one model; one more is answered 429"),
    default=1024,
)
HOLD = Flag(
    *("--hold-s", "SECONDS", zero_or_more("seconds")),
    "how long requests, and answers under way, wait for a server that is expected back, after a restart for "
    "example, before they are answered 503; 0: not at all",
    default=15.0,
)
API_KEYS_FILE = Flag(
    *("--api-keys-file", "FILE", existing_file),
    "who may send requests: a file that `twinfang api-key` adds keys to; read again whenever it changes",
    default_text="none: everybody may",
)
MAX_HEADER_SIZE = Flag(
    *("--max-header-size", "KIB", positive("KiB"), "largest URL and headers; larger ones are answered 431"),
    default=32.0,
)
CORS_ORIGINS = Flag(
    *("--cors-origin", "ORIGIN", some_text),
    "let pages of this origin (https://chat.example.com; * for all) use the API from a browser; repeat for "
    "more",
    repeatable=True,
    default_text="none",
)
ALLOWED_HOSTS = Flag(
    *("--allowed-host", "NAME", some_text),
    "take requests that name this host (api.example.com; *.example.com for all below; * for any), loopback "
    "names and no other; repeat for more",
    repeatable=True,
    default_text="any, or loopback names alone where --host is one",
)
FORWARDED_ALLOW_IPS = Flag(
    *("--forwarded-allow-ips", "ADDRESS", some_text),
    "a proxy, or a network of proxies, in front: its X-Forwarded-For says which client a request is from; "
    "repeat for more",
    repeatable=True,
    default_text="none",
)
ALLOW_LINK_LOCAL_WORKERS = Flag(
    *("--allow-link-local-workers", "", yes_or_no),
    "the admin API may add servers at link-local addresses (169.254.0.0/16, fe80::/10), where clouds keep a "
    "machine's credentials",
    default=False,
    default_text="off",
    is_switch=True,
)
MAX_BODY_SIZE = Flag(
    *("--max-body-size", "MIB", positive("MiB"), "largest body of a request; a larger one is answered 413"),
    default=8.0,
)
MAX_CHOICES = Flag(
    *("--max-choices", "N", _at_least_one, "answers to one request at most: its prompts times n"), default=512
)
REQUEST_TIMEOUT = Flag(
    *("--request-timeout", "SECONDS", _seconds, "from a request's arrival to its last token"), default=600.0
)
SHUTDOWN_GRACE = Flag(
    *("--shutdown-grace", "SECONDS", _seconds, "what answers under way get to end after SIGTERM"),
    default=10.0,
)
ADMIN_TOKEN_FILE = Flag(
    *("--admin-token-file", "FILE", existing_file),
    "file with the admin API's token, or sha256: and its hexadecimal digest",
    default_text="none: there is no admin API",
)
WORKERS = Flag(
    *("--workers", "N", integer(1, 64)),
    "router processes that share the port; each has the limits to itself",
    default=1,
)
PLACE = Flag(
    *("--place", "INDEX:PORTS", process_place, "which one of several processes this is"), is_internal=True
)
STATE_FILE = Flag(
    *("--state-file", "FILE", file_path),
    "SQLite file that keeps what is changed through the admin API: a router that starts goes on from there, "
    "whatever its flags say",
    default_text="none: changes last until the router stops",
)
PREFILL_ADDRESSES = Flag(
    *("--prefill", "HOST:PORT", address, "a prefill server; repeat for more"), repeatable=True
)
DECODE_ADDRESSES = Flag(
    *("--decode", "HOST:PORT", address, "a decode server; repeat for more"), repeatable=True
)
KUBERNETES_NAMESPACE = Flag(
    *("--kubernetes-namespace", "NS", some_text),
    "find servers that are pods of this namespace, by their labels twinfang.io/role and twinfang.io/port, "
    "and follow them as they come and go",
    default_text="none: pods are not looked at",
)
KUBERNETES_SELECTOR = Flag(
    *("--kubernetes-selector", "LABELS", some_text, "which pods of the namespace: a label selector"),
    default="twinfang.io/role",
)
KUBECONFIG = Flag(
    *("--kubeconfig", "FILE", existing_file, "how the Kubernetes API is reached"),
    default_text="the service account of the pod that this runs in",
)
DISCOVERY = (KUBERNETES_NAMESPACE, KUBERNETES_SELECTOR, KUBECONFIG)

CONVERSATION_RETURN = Flag(
    *("--conversation-return", "", yes_or_no),
    "decode servers keep an answer's state, so that a conversation's next turn computes its new tokens alone",
    default=False,
    default_text="off",
    is_switch=True,
)

_policy = one_of("least_loaded", "prefix_affinity", "round_robin")
PREFILL_POLICY = Flag(
    *("--prefill-policy", "least_loaded|prefix_affinity|round_robin", _policy),
    "how the router chooses a prompt's prefill server",
    default="prefix_affinity",
)
DECODE_POLICY = Flag(
    *("--decode-policy", "least_loaded|prefix_affinity|round_robin", _policy, "the same of decode servers"),
    default="least_loaded",
)
TOOL_CALL_PARSER = Flag(
    "--tool-call-parser",
    "auto|none|hermes|nemotron_json|qwen3_coder",
    one_of("auto", "none", "hermes", "nemotron_json", "qwen3_coder"),
    "how models write calls of tools; auto sees it in their chat templates",
    default="auto",
)
SESSION_HEADER = Flag(
    *("--session-header", "NAME", some_text),
    "HTTP header that names a session; requests of a session go to the same servers",
    default_text="none: the policies choose for every request",
)

ROUTER_LIMITS = (
    WORKERS,
    ALIASES,
    API_KEYS_FILE,
    MAX_REQUESTS_IN_FLIGHT,
    MAX_QUEUE,
    HOLD,
    MAX_BODY_SIZE,
    MAX_HEADER_SIZE,
    MAX_CHOICES,
    REQUEST_TIMEOUT,
    PREFILL_POLICY,
    DECODE_POLICY,
    TOOL_CALL_PARSER,
    SESSION_HEADER,
    SHUTDOWN_GRACE,
    CONVERSATION_RETURN,
    ADMIN_TOKEN_FILE,
    STATE_FILE,
    CORS_ORIGINS,
    ALLOWED_HOSTS,
    FORWARDED_ALLOW_IPS,
    ALLOW_LINK_LOCAL_WORKERS,
)
ROUTER_FLAGS = (
    MODELS,
    SERVED_MODEL_NAME,
    PREFILL_ADDRESSES,
    DECODE_ADDRESSES,
    *DISCOVERY,
    *ROUTER_LIMITS,
)
"""All of a router but where it listens and how it logs."""
