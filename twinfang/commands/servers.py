"""``twinfang prefill``, ``decode`` and ``router``: one process each, in the foreground.

Only this module builds the configurations of servers and routers from flags. It imports torch only for the
commands that need torch, and only after :func:`prepare_libraries`, which has no effect once torch is loaded.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from twinfang.commands.before_torch import prepare_libraries
from twinfang.commands.read_ahead import read_ahead
from twinfang.flags.file_cache import file_cache
from twinfang.flags.tls import identity_files
from twinfang.process_secret import SECRET_VARIABLE
from twinfang.stack.cores import usable_cores
from twinfang.stack.node_place import find_nodes
from twinfang.stack.rank_place import ONLY_PLACE, RankPlace
from wire.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.group.nodes import Nodes
    from router.config import ModelSource, PodDiscovery, RouterConfig, TokenIssuer
    from wire.messages.handoff import Role
    from wire.tls.identity_files import IdentityFiles
    from wire.tls.key_pair_files import KeyPairFiles

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
SHORTEST_LINK_TIMEOUT_S = 1.0
"""With a shorter timeout, UCX would give up a link that has only lost a few packets."""


def prepare_prefill(values: argparse.Namespace) -> Callable[[], None]:
    _begin_server(values)
    from prefill_server.config import PrefillConfig
    from prefill_server.service import PrefillService
    from telemetry.server_process import run_server

    identity = identity_files(values)
    engine = _engine_config(values, "prefill", nodes=find_nodes(values, os.environ, identity))
    engine = replace(engine, neighbour_wait_s=values.neighbour_wait)
    _check_pools(engine)
    if engine.nodes.rank > 0:
        return _other_host(engine)
    config = PrefillConfig(
        engine=engine,
        host=values.host,
        port=values.port,
        served_model_name=_model_name(values),
        advertise_host=values.advertise_host,
        metrics_port=values.metrics_port,
        vllm_metrics=values.vllm_metrics,
        otlp_endpoint=values.otlp_endpoint or "",
        lease_ttl_s=values.lease_ttl,
        hang_deadline_s=values.hang_deadline,
        verify_handoffs=values.verify_handoffs,
        identity=identity,
    )
    _notice_cut_links(config.transfer_deadline_s)
    return partial(run_server, config, config.engine.role, partial(PrefillService, config))


def prepare_decode(values: argparse.Namespace) -> Callable[[], None]:
    place = RankPlace.find(values, os.environ)
    if place.count > 1 and values.nnodes == 1:
        from twinfang.stack import rank_group

        return partial(rank_group.run, values, place)
    if values.probe_port:
        raise ConfigError(
            f"--probe-port {values.probe_port} is for several ranks on one host; a single server answers the "
            "same probes on its --metrics-port"
        )
    _begin_server(values)
    from decode_server.config import DecodeConfig
    from decode_server.service import DecodeService
    from telemetry.server_process import run_server

    identity = identity_files(values)
    nodes = find_nodes(values, os.environ, identity)
    engine = _engine_config(values, values.role, place, nodes, identity)
    _check_pools(engine)
    if engine.nodes.rank > 0:
        return _other_host(engine)
    config = DecodeConfig(
        engine=engine,
        host=values.host,
        port=values.port and values.port + place.port_offset,
        served_model_name=_model_name(values),
        transfer_deadline_s=values.transfer_deadline,
        hang_deadline_s=values.hang_deadline,
        local_prefill=values.local_prefill,
        verify_handoffs=values.verify_handoffs,
        advertise_host=values.advertise_host,
        metrics_port=values.metrics_port and values.metrics_port + place.port_offset,
        vllm_metrics=values.vllm_metrics,
        otlp_endpoint=values.otlp_endpoint or "",
        identity=identity,
    )
    _notice_cut_links(config.transfer_deadline_s)
    return partial(run_server, config, config.engine.role, partial(DecodeService, config))


def _check_pools(config: EngineConfig) -> None:
    """Raises :class:`ConfigError` if other servers could read this server's pools only slowly."""
    from kv_transfer.nixl.pool_memory import refuse_expandable_segments

    if config.role != "both":
        refuse_expandable_segments(config.resolve_device(), os.environ)


def _other_host(config: EngineConfig) -> Callable[[], None]:
    """Returns the function that runs this host's ranks of a server whose ports are on another host."""
    from engine.ranks import node_ranks
    from kv_transfer.ranks.rank_exchange import rank_main
    from kv_transfer.ranks.rank_files import rank_files

    return partial(node_ranks.run, config, rank_main(config.role), rank_files)


def prepare_router(values: argparse.Namespace) -> Callable[[], None]:
    from router.main import run

    config = router_config(values)
    if values.workers > 1:
        from router.resources import Files
        from twinfang.stack import router_processes

        def run_several() -> None:
            Files.read(config).close()  # once, here: otherwise each process would report the same error
            router_processes.run(values)

        return run_several

    def run_until_signal() -> None:
        # After uvicorn has stopped, it raises again the signal that stopped it; these handlers get it.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda _signum, _frame: sys.exit(0))
        run(config)

    return run_until_signal


def router_config(values: argparse.Namespace) -> RouterConfig:
    """Builds a router's configuration. Raises :class:`ConfigError` for flags that contradict one another."""
    from router.config import RouterConfig

    place = values.place
    if place is not None:
        # Popped: children of this process, such as those that compile grammars, do not need it.
        place = replace(place, secret=os.environ.pop(SECRET_VARIABLE, ""))
    return RouterConfig(
        models=_served_models(values),
        aliases=values.alias,
        decode_addresses=values.decode,
        prefill_addresses=values.prefill,
        pods=_pod_discovery(values),
        host=values.host,
        port=values.port,
        certificate=_certificate(values),
        identity=identity_files(values),
        max_body_bytes=int(values.max_body_size * MIB),
        max_header_bytes=int(values.max_header_size * KIB),
        max_requests_in_flight=values.max_requests_in_flight,
        max_queue=values.max_queue,
        hold_s=values.hold_s,
        api_keys_file=values.api_keys_file,
        token_issuer=_token_issuer(values),
        metrics_need_role=values.metrics_need_role,
        audit_log=values.audit_log,
        cache_isolation=values.cache_isolation,
        limit_store=values.limit_store or "",
        cors_origins=values.cors_origin,
        allowed_hosts=values.allowed_host,
        forwarded_allow_ips=values.forwarded_allow_ips,
        allow_link_local_workers=values.allow_link_local_workers,
        max_choices=values.max_choices,
        request_timeout_s=values.request_timeout,
        shutdown_grace_s=values.shutdown_grace,
        conversation_return=values.conversation_return,
        prefill_policy=values.prefill_policy,
        decode_policy=values.decode_policy,
        tool_call_parser=values.tool_call_parser,
        reasoning_parser=values.reasoning_parser,
        session_header=values.session_header or "",
        otlp_endpoint=values.otlp_endpoint or "",
        admin_token_file=values.admin_token_file,
        place=place,
        state_file=values.state_file,
        response_store=values.response_store,
        response_store_bytes=int(values.response_store_size * MIB),
        response_store_ttl_s=values.response_store_ttl,
    )


def _certificate(values: argparse.Namespace) -> KeyPairFiles | None:
    from wire.tls.key_pair_files import KeyPairFiles

    certificate, key, password = values.ssl_certfile, values.ssl_keyfile, values.ssl_keyfile_password_file
    if certificate is not None and key is not None:
        return KeyPairFiles(certificate, key, password)
    if certificate is None and key is None and password is None:
        # With mutual TLS nothing is served in clear. Clients need no certificate.
        return None if values.tls_cert is None else KeyPairFiles(values.tls_cert, values.tls_key)
    lacking = " and ".join(
        flag for flag, value in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)) if value is None
    )
    raise ConfigError(f"HTTPS needs a certificate and its private key: give {lacking} too")


def _token_issuer(values: argparse.Namespace) -> TokenIssuer | None:
    from router.config import TokenIssuer

    if values.jwt_issuer is not None and values.jwt_audience is not None:
        return TokenIssuer(
            values.jwt_issuer,
            values.jwt_audience,
            values.jwt_keys or "",
            values.jwt_tenant_claim,
            values.jwt_priority_claim,
            values.jwt_limits_claim,
            values.jwt_role_claim,
        )
    given = [f"--jwt-{name}" for name in ("issuer", "audience", "keys") if getattr(values, f"jwt_{name}")]
    if not given:
        return None
    raise ConfigError(f"bearer tokens need --jwt-issuer and --jwt-audience, given is only {', '.join(given)}")


def _pod_discovery(values: argparse.Namespace) -> PodDiscovery | None:
    from router.config import PodDiscovery

    if values.kubernetes_namespace is not None:
        return PodDiscovery(values.kubernetes_namespace, values.kubernetes_selector, values.kubeconfig)
    if values.kubeconfig is not None:
        raise ConfigError("--kubeconfig is used only for finding pods: give --kubernetes-namespace NS too")
    return None


def prepare_plan(values: argparse.Namespace) -> Callable[[], None]:
    from twinfang.plan.plan import prepare

    unasked = {
        "load_format": "auto",
        "device": "auto",
        "steps_ahead": None,
        "stream_interval": None,
        "sanitize": False,
        "step_deadline": None,
        "threads": None,
        "nice": 0,
    }
    made_for_any = argparse.Namespace(**vars(values), **unasked)
    place = RankPlace(values.data_parallel_size)
    return prepare(values, _engine_config(made_for_any, values.role, place))


def prepare_check_network(values: argparse.Namespace) -> Callable[[], None]:
    from twinfang.network import check, nccl_check

    return nccl_check.prepare(values) if values.nccl else check.prepare(values)


def prepare_bench(values: argparse.Namespace) -> Callable[[], None]:
    from twinfang.bench.command import prepare

    return prepare(values)


def _engine_config(
    values: argparse.Namespace,
    role: Role,
    place: RankPlace = ONLY_PLACE,
    nodes: Nodes | None = None,
    identity: IdentityFiles | None = None,
) -> EngineConfig:
    from engine.config import EngineConfig
    from engine.group.data_parallel import DataParallel
    from engine.group.nodes import ONE_NODE
    from engine.group.store import GroupStore

    nodes = nodes or ONE_NODE
    num_ranks_here = max(1, values.tensor_parallel // nodes.size)
    return EngineConfig(
        model_dir=values.model,
        role=role,
        load_format=values.load_format,
        dtype=values.dtype,
        weight_dtype=values.weight_dtype,
        device=values.device,
        max_model_len=values.max_model_len,
        max_num_seqs=values.max_num_seqs,
        max_batch_tokens=values.max_batch_tokens,
        long_prefill_threshold=values.long_prefill_threshold,
        block_size=values.block_size,
        kv_cache_dtype=values.kv_cache_dtype,
        mamba_ssm_cache_dtype=values.mamba_ssm_cache_dtype,
        mamba_cache_stochastic_rounding=values.enable_mamba_cache_stochastic_rounding,
        batch_invariant=values.batch_invariant,
        cache_mode=values.cache_mode,
        cache_policy=values.cache_policy,
        state_block_size=values.state_block_size,
        cached_states=values.cached_states,
        host_cache_bytes=int(values.host_cache_size * GIB),
        file_cache=file_cache(values),
        cache_memory_bytes=None if values.cache_memory is None else int(values.cache_memory * GIB),
        num_speculative=values.speculative,
        drafter=values.drafter,
        ngram_min=values.ngram_min,
        ngram_max=values.ngram_max,
        speculative_state=values.speculative_state,
        steps_ahead=values.steps_ahead,
        stream_interval_s=values.stream_interval,
        sanitize=values.sanitize,
        step_deadline_s=values.step_deadline,
        num_threads=values.threads or max(1, usable_cores() // num_ranks_here),
        niceness=values.nice,
        tensor_parallel=values.tensor_parallel,
        nodes=nodes,
        data_parallel=DataParallel(
            place.first,
            place.size,
            GroupStore(place.address, is_own=place.hosts_store, life=place.life, identity=identity),
            place.local_rank,
        ),
        expert_parallel=role != "prefill" and values.enable_expert_parallel,
    )


def _model_name(values: argparse.Namespace) -> str:
    name: str = values.served_model_name or values.model.name
    return name


def _served_models(values: argparse.Namespace) -> tuple[ModelSource, ...]:
    """Returns the models of a router. Every other command has only one model."""
    from router.config import ModelSource
    from twinfang.flags.table import BUNDLED_MODEL

    sources: tuple[ModelSource, ...] = values.model or (ModelSource(BUNDLED_MODEL.name, BUNDLED_MODEL),)
    name = values.served_model_name
    if name is None:
        return sources
    if len(sources) > 1:
        raise ConfigError(
            f"--served-model-name {name!r} can't name {len(sources)} models: give --model NAME=DIR for each"
        )
    return (ModelSource(name, sources[0].directory),)


def server_config(values: argparse.Namespace, command: str) -> EngineConfig:
    """Builds the engine's configuration of ``prefill`` or ``decode`` for a server without other hosts."""
    role: Role = "prefill" if command == "prefill" else values.role
    return _engine_config(values, role, RankPlace.find(values, {}) if command == "decode" else ONLY_PLACE)


def _begin_server(values: argparse.Namespace) -> None:
    """Does what has to be done before torch is imported."""
    prepare_libraries()
    if values.load_format == "auto":
        read_ahead(values.model)


def _notice_cut_links(timeout_s: float) -> None:
    """Sets UCX's timeout for cut TCP connections. UCX itself checks only silent connections. If a link is cut
    while bytes are unacknowledged, the operating system keeps the connection for a quarter of an hour, and
    the destination of a read stays in quarantine for the same time.

    UCX reads the variable when NIXL starts.
    """
    milliseconds = 1000 * max(timeout_s, SHORTEST_LINK_TIMEOUT_S)
    os.environ.setdefault("UCX_TCP_USER_TIMEOUT", f"{milliseconds:.0f}ms")
