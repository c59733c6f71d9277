"""Flags that only ``twinfang autoscale`` has, and its groups of flags.

All its other flags are in twinfang/flags/table.py and twinfang/flags/router.py.
"""

from __future__ import annotations

from twinfang.flags import router as router_flags
from twinfang.flags import table
from twinfang.flags.flag import Flag, FlagGroup
from twinfang.flags.values import (
    existing_file,
    http_url,
    integer,
    port_or_off,
    positive,
    some_text,
    yes_or_no,
)

ROUTER_METRICS = Flag(
    *("--router-metrics", "URL", http_url),
    "metrics page of routers, http://HOST:8000/metrics, or https://; if the name has several addresses, the "
    "pages of all are read; repeat for more",
    repeatable=True,
)
ROUTER_CA_FILE = Flag(
    *("--router-ca-file", "FILE", existing_file),
    "certificates of the authorities that routers' certificates must come from, in PEM, for https://",
    default_text="--tls-ca, else those of the system",
)
ROUTER_SERVER_NAME = Flag(
    *("--router-server-name", "NAME", some_text),
    "name that routers' certificates must have",
    default_text="a router's name of --tls-names if --tls-ca is used, else the name in the URL",
)
ROUTER_TOKEN_FILE = Flag(
    *("--router-token-file", "FILE", existing_file),
    "an API key that has the role `view`, or a bearer token, for routers with --metrics-need-role; read anew "
    "for each look",
    default_text="none",
)
PREFILL_METRICS = Flag(
    *("--prefill-metrics", "URL", http_url),
    "the same for prefill servers; https:// with mutual TLS",
    repeatable=True,
)
DECODE_METRICS = Flag(*("--decode-metrics", "URL", http_url), "the same for decode servers", repeatable=True)
PREFILL_DEPLOYMENT = Flag(
    *("--prefill-deployment", "NAME", some_text, "Deployment that runs the prefill servers"),
    default_text="none: as many servers as metrics show",
)
DECODE_DEPLOYMENT = Flag(
    *("--decode-deployment", "NAME", some_text, "Deployment that runs the decode servers"),
    default_text="none: as many servers as metrics show",
)
DEPLOYMENTS_NAMESPACE = Flag(
    *("--kubernetes-namespace", "NS", some_text, "namespace of these Deployments"), default_text="none"
)
APPLY = Flag(
    *("--apply", "", yes_or_no, "scale the Deployments; without it, only print decisions"),
    default=False,
    default_text="off",
    is_switch=True,
)
MIN_PREFILL = Flag(*("--min-prefill", "N", integer(1), "fewest prefill servers"), default=1)
MAX_PREFILL = Flag(*("--max-prefill", "N", integer(1), "most prefill servers"), default=8)
MIN_DECODE = Flag(*("--min-decode", "N", integer(1), "fewest decode servers"), default=1)
MAX_DECODE = Flag(*("--max-decode", "N", integer(1), "most decode servers"), default=8)
QUEUE_TIME = Flag(
    *("--queue-time", "SECONDS", positive("seconds")),
    "objective for each wait, in routers, on prefill servers and on decode servers, for 90% of all requests",
    default=0.2,
)
INTERVAL = Flag(
    *("--interval", "SECONDS", positive("seconds"), "time between two looks at the metrics"), default=15.0
)
WINDOW = Flag(
    *("--window", "SECONDS", positive("seconds"), "time over which loads are averaged"), default=60.0
)
UP_PAUSE = Flag(
    *("--up-pause", "SECONDS", positive("seconds"), "pause after a change of a pool before it grows again"),
    default=60.0,
)
DOWN_AFTER = Flag(
    *("--down-after", "SECONDS", positive("seconds")),
    "how long fewer servers must be enough, counted from the pool's last change, before it shrinks",
    default=300.0,
)
METRICS_PORT = Flag(
    *("--metrics-port", "PORT|off", port_or_off, "port of its own /metrics, /healthz and /readyz"),
    default_text="none",
)

POOLS = FlagGroup(
    "pools",
    (
        ROUTER_METRICS,
        ROUTER_CA_FILE,
        ROUTER_SERVER_NAME,
        ROUTER_TOKEN_FILE,
        PREFILL_METRICS,
        DECODE_METRICS,
        *(MIN_PREFILL, MAX_PREFILL, MIN_DECODE, MAX_DECODE),
    ),
)
GOALS = FlagGroup("objectives", (table.TTFT, table.TPOT, QUEUE_TIME))
PACE = FlagGroup("pace", (INTERVAL, WINDOW, UP_PAUSE, DOWN_AFTER))
TARGETS = FlagGroup(
    "what is scaled",
    (PREFILL_DEPLOYMENT, DECODE_DEPLOYMENT, DEPLOYMENTS_NAMESPACE, router_flags.KUBECONFIG, APPLY),
)
