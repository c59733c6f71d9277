"""What gRPC reads from the environment when it is imported."""

from __future__ import annotations

import os

GRPC_SETTINGS = {"GRPC_VERBOSITY": "ERROR", "GRPC_ENABLE_FORK_SUPPORT": "0"}
"""gRPC's messages below level ERROR have a format of their own. Our forked processes make no gRPC calls, so
gRPC needs no preparation for forks."""


def set_grpc_settings() -> None:
    """Sets what is not set of :data:`GRPC_SETTINGS`, for this process and for those that it starts."""
    for name, value in GRPC_SETTINGS.items():
        os.environ.setdefault(name, value)
