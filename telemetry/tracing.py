"""Starts the export of traces by OTLP, if a flag or the standard OTEL_* variables ask for it.

The SDK (``pip install 'twinfang[otel]'``) is imported only if the process exports traces.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from wire.errors import ConfigError

if TYPE_CHECKING:
    from telemetry.otel import Tracing

log = logging.getLogger(__name__)

PROTOCOLS = ("http/protobuf", "grpc")
INSTALL = "the OpenTelemetry SDK is not installed: pip install 'twinfang[otel]'"


def start_tracing(
    service: str, instance_id: str, *, endpoint: str, environment: Mapping[str, str]
) -> Tracing | None:
    """Start to export traces. None if neither flag nor variables ask for it.

    Raises :class:`ConfigError` for settings that can't work. If only the environment asks for traces and the
    SDK is missing, a warning is logged and there are no traces, since such variables are often set for all
    processes of a cluster.
    """
    if not endpoint and not _is_asked_for(environment):
        return None
    protocol = _first(environment, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = protocol or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol!r}: expected {' or '.join(PROTOCOLS)}")
    try:
        from telemetry.otel import Tracing, make_exporter

        exporter = make_exporter(protocol, endpoint or None)
    except ImportError as error:
        if endpoint:
            raise ConfigError(f"--otlp-endpoint {endpoint}: {INSTALL}") from error
        log.warning("no traces: %s", INSTALL)
        return None
    log.info("traces go by OTLP (%s) to %s", protocol, endpoint or "where OTEL_EXPORTER_OTLP_* says")
    return Tracing(service, instance_id, exporter)


def _is_asked_for(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "")
    if exporters:
        return "otlp" in exporters.split(",")
    return bool(_first(environment, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"))


def _first(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")
