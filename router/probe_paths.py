"""Where probes and scrapers look, which have no keys, and which are answered to the end."""

from __future__ import annotations

PROBE_PATHS = ("/healthz", "/readyz", "/metrics", "/health", "/ping", "/version")
