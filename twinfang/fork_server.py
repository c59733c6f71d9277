"""The fork server of a stack: ``python -m twinfang.fork_server FD`` (:mod:`twinfang.forking`).

Imports the servers' modules, then loads their weights and the CPU kernels once for all servers.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import signal
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from twinfang.collector import collector_paused
from twinfang.commands.before_torch import prepare_libraries
from twinfang.commands.servers import server_config
from twinfang.commands.table import COMMANDS
from twinfang.flags.flag import add_flags, resolve
from twinfang.forking.loop import serve_forks
from twinfang.logs import configure_logs
from wire.errors import TwinfangError

if TYPE_CHECKING:
    from engine.config import EngineConfig

log = logging.getLogger(__name__)

IMPORTED = (
    *("decode_server.service", "prefill_server.service", "telemetry.server_process", "twinfang.cli"),
    *("numba", "numba.core.typed_passes"),
)
"""Modules that servers need, by name: their imports are not to begin before the libraries are prepared."""

MOST_BYTES_TO_RUN = 128 << 20


def main(fd: int) -> None:
    """Serves the process at the other end of the socket ``fd``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the supervisor, which ends this process
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    prepare_libraries()
    with collector_paused():
        for name in IMPORTED:
            importlib.import_module(name)
    configure_logs("warning", "fork-server")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve_forks(connection, load_for_all)


def load_for_all(command_lines: list[list[str]]) -> None:
    """Loads what servers with these command lines have in common. What can't be loaded is left to the
    servers, which say why."""
    from engine.models.inherited import keep_models

    keep_models()
    for arguments in command_lines:
        try:
            config = _engine_config(arguments)
            if _is_shareable(config):
                _load(config)
        except TwinfangError as error:
            log.debug("%s", error.message)


def _load(config: EngineConfig) -> None:
    """Loads the weights. Loads the kernels by making an engine, unless its short requests would read so many
    bytes that servers do this better at the same time."""
    from engine.engine import Engine
    from engine.engine_parts import load_weights
    from engine.models import read_config
    from engine.parallel.tensor_parallel import ALONE
    from kernels.cpu.shared_cores import share_cores
    from telemetry.start_up import StartUp

    config, start_up = replace(config, num_threads=1), StartUp()
    device = config.resolve_device()
    model = read_config(config.model_dir, config.dtype, device, config.weight_dtype)
    config.apply_threads(model.dtype)
    load_weights(config, model, device, ALONE, start_up)
    if start_up.weight_bytes <= MOST_BYTES_TO_RUN:
        share_cores()  # servers with a large model answer less with one thread each: its calls are long
        Engine(config).grammars.close()


def _engine_config(arguments: list[str]) -> EngineConfig:
    groups = next(command.groups for command in COMMANDS if command.name == arguments[0])
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, groups)
    return server_config(resolve(groups, parser.parse_args(arguments[1:]), {}), arguments[0])


def _is_shareable(config: EngineConfig) -> bool:
    """Whether other processes can use the loaded model: not if ranks share its weights."""
    return config.num_expert_ranks == 1


if __name__ == "__main__":
    main(int(sys.argv[1]))
