"""The flags of a router."""

from __future__ import annotations

from twinfang.flags import access
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
    "most answers of one model at the same time, where each of a request's n answers counts, and never "
    "more than the model's servers have room for; further requests wait",
    default=1024,
)
MAX_QUEUE = Flag(
    *("--max-queue", "N", integer(0), "most requests that wait for one model; more are answered 429"),
    default=1024,
)
HOLD = Flag(
    *("--hold-s", "SECONDS", zero_or_more("seconds")),
    "how long requests and running answers wait for a server that is expected back, for example after a "
    "restart; then they are answered 503; 0: they don't wait",
    default=15.0,
)
SSL_CERTFILE = Flag(
    *("--ssl-certfile", "FILE", existing_file),
    "the router's certificate for HTTPS, and those between it and its root, in PEM; read again whenever it "
    "changes",
    default_text="none: HTTP",
)
SSL_KEYFILE = Flag(
    *("--ssl-keyfile", "FILE", existing_file),
    "private key of the certificate, in PEM; the file may be the same",
    default_text="none",
)
SSL_KEYFILE_PASSWORD_FILE = Flag(
    *("--ssl-keyfile-password-file", "FILE", existing_file),
    "file with the password of an encrypted private key",
    default_text="none: the key is not encrypted",
)
MAX_HEADER_SIZE = Flag(
    *("--max-header-size", "KIB", positive("KiB"), "largest URL and headers; larger ones are answered 431"),
    default=32.0,
)
CORS_ORIGINS = Flag(
    *("--cors-origin", "ORIGIN", some_text),
    "let web pages of this origin (https://chat.example.com; * for all) use the API from a browser; repeat "
    "for more",
    repeatable=True,
    default_text="none",
)
ALLOWED_HOSTS = Flag(
    *("--allowed-host", "NAME", some_text),
    "accept only requests that name this host (api.example.com; *.example.com for its subdomains; * for "
    "any) or a loopback name; repeat for more",
    repeatable=True,
    default_text="any; only loopback names if --host is a loopback address",
)
FORWARDED_ALLOW_IPS = Flag(
    *("--forwarded-allow-ips", "ADDRESS", some_text),
    "a proxy, or a network of proxies, in front of the router; the router reads the client's address from "
    "its X-Forwarded-For; repeat for more",
    repeatable=True,
    default_text="none",
)
ALLOW_LINK_LOCAL_WORKERS = Flag(
    *("--allow-link-local-workers", "", yes_or_no),
    "let the admin API add servers at link-local addresses (169.254.0.0/16, fe80::/10), where clouds offer a "
    "machine's credentials",
    default=False,
    default_text="off",
    is_switch=True,
)
MAX_BODY_SIZE = Flag(
    *("--max-body-size", "MIB", positive("MiB"), "largest body of a request; larger ones are answered 413"),
    default=8.0,
)
MAX_CHOICES = Flag(
    *("--max-choices", "N", _at_least_one, "most answers to one request: its prompts times n"), default=512
)
REQUEST_TIMEOUT = Flag(
    *("--request-timeout", "SECONDS", _seconds, "longest time from a request's arrival to its last token"),
    default=600.0,
)
SHUTDOWN_GRACE = Flag(
    *("--shutdown-grace", "SECONDS", _seconds, "time that running answers have to end after SIGTERM"),
    default=10.0,
)
WORKERS = Flag(
    *("--workers", "N", integer(1, 64)),
    "number of router processes that share the port; the limits apply to each process, except those of API "
    "keys",
    default=1,
)
PLACE = Flag(
    *("--place", "INDEX:PORTS", process_place, "which of several processes this is"), is_internal=True
)
STATE_FILE = Flag(
    *("--state-file", "FILE", file_path),
    "SQLite file that stores changes made through the admin API; a router that starts continues from it, "
    "even if its flags differ",
    default_text="none: changes last until the router stops",
)
RESPONSE_STORE = Flag(
    *("--response-store", "FILE", file_path),
    "SQLite file that keeps responses of /v1/responses, so that clients can continue, read and delete them",
    default_text="none: responses are not kept",
)
RESPONSE_STORE_SIZE = Flag(
    *("--response-store-size", "MIB", positive("MiB")),
    "most that all stored responses take together; the oldest are deleted first",
    default=1024.0,
)
RESPONSE_STORE_TTL = Flag(
    *("--response-store-ttl", "SECONDS", _seconds),
    "how long a response is kept after it was made or last continued; the default is 30 days",
    default=2592000.0,
)
PREFILL_ADDRESSES = Flag(
    *("--prefill", "HOST:PORT", address, "a prefill server; repeat for more"), repeatable=True
)
DECODE_ADDRESSES = Flag(
    *("--decode", "HOST:PORT", address, "a decode server; repeat for more"), repeatable=True
)
KUBERNETES_NAMESPACE = Flag(
    *("--kubernetes-namespace", "NS", some_text),
    "find servers among the pods of this namespace, by their labels twinfang.io/role and twinfang.io/port, "
    "and notice when pods come and go",
    default_text="none: no search for pods",
)
KUBERNETES_SELECTOR = Flag(
    *("--kubernetes-selector", "LABELS", some_text, "label selector of the pods in the namespace"),
    default="twinfang.io/role",
)
KUBECONFIG = Flag(
    *("--kubeconfig", "FILE", existing_file, "kubeconfig file for the Kubernetes API"),
    default_text="the service account of this process's pod",
)
DISCOVERY = (KUBERNETES_NAMESPACE, KUBERNETES_SELECTOR, KUBECONFIG)

CONVERSATION_RETURN = Flag(
    *("--conversation-return", "", yes_or_no),
    "decode servers keep an answer's state, so that a conversation's next turn computes only its new tokens",
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
    *("--decode-policy", "least_loaded|prefix_affinity|round_robin", _policy, "the same for decode servers"),
    default="least_loaded",
)
_PARSERS = (
    *("auto", "none", "deepseek_v3", "deepseek_v31", "glm45", "glm47", "granite", "hermes", "kimi_k2"),
    *("llama3_json", "llama4_pythonic", "minimax", "minimax_m2", "mistral", "nemotron_json", "pythonic"),
    *("qwen3_coder", "qwen3_xml"),
)
TOOL_CALL_PARSER = Flag(
    "--tool-call-parser",
    "NAME",
    one_of(*_PARSERS),
    f"how models write tool calls: {', '.join(_PARSERS)}; auto: as their chat templates show",
    default="auto",
)
_reasoning_parsers = (
    *("auto", "none", "deepseek_r1", "deepseek_v3", "glm45", "granite", "kimi_k2", "minimax_m2", "mistral"),
    *("nemotron_v3", "olmo3", "qwen3", "seed_oss"),
)
REASONING_PARSER = Flag(
    *("--reasoning-parser", "|".join(_reasoning_parsers), one_of(*_reasoning_parsers)),
    "format in which models mark their thinking; auto finds it from their chat templates; none: thinking is "
    "part of the content",
    default="auto",
)
SESSION_HEADER = Flag(
    *("--session-header", "NAME", some_text),
    "HTTP header that names a session; requests of one session go to the same servers",
    default_text="none: the policies choose servers for every request",
)

TLS = (SSL_CERTFILE, SSL_KEYFILE, SSL_KEYFILE_PASSWORD_FILE)

ROUTER_LIMITS = (
    WORKERS,
    ALIASES,
    *TLS,
    *access.ACCESS,
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
    REASONING_PARSER,
    SESSION_HEADER,
    SHUTDOWN_GRACE,
    CONVERSATION_RETURN,
    STATE_FILE,
    RESPONSE_STORE,
    RESPONSE_STORE_SIZE,
    RESPONSE_STORE_TTL,
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
"""All flags of a router except the listening address and the log flags."""
