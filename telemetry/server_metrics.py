"""All metrics of one prefill or decode server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from telemetry.engine_metrics import Measures
from telemetry.families.file_cache import file_cache_families
from telemetry.families.handoff import handoff_families
from telemetry.families.host_cache import host_cache_families
from telemetry.families.neighbour_cache import neighbour_cache_families
from telemetry.families.speculation import speculation_families
from telemetry.start_up import StartUp
from wire.messages.generation import ServerInfo, ServerStats

GAUGES = (
    ("requests_running", "num_running", "Requests with room that compute or decode."),
    ("requests_waiting", "num_waiting", "Requests queued for room or for their transfer."),
    ("queued_tokens", "queued_tokens", "Tokens of prompts that are not computed or read yet."),
    ("kv_blocks", "num_blocks", "KV blocks in total."),
    ("kv_blocks_free", "free_blocks", "KV blocks that new requests can get; cached ones are among them."),
    ("kv_blocks_cached", "cached_blocks", "KV blocks that the prefix cache holds."),
    ("state_slots", "num_slots", "Slots of Mamba states in total."),
    ("state_slots_free", "free_slots", "State slots that new requests can get; cached ones are among them."),
    ("states_cached", "cached_states", "Mamba states that the prefix cache holds."),
)
COUNTERS = (
    ("preemptions", "preemptions", "Requests moved to host memory because blocks were short."),
    ("given_rows", "given_rows", "Requests moved to host memory so that another client's request got a row."),
    ("prefill_tokens", "prefill_tokens", "Prompt tokens computed."),
    ("generation_tokens", "decode_tokens", "Tokens sampled."),
    ("transfer_bytes", "transfer_bytes", "Bytes read from other servers."),
    (
        "transfer_early_bytes",
        "early_bytes",
        "Bytes read from other servers before their prompt was computed.",
    ),
    ("transfer_parts", "transfer_parts", "Parts of prompts that have landed."),
)


@dataclass(frozen=True)
class StatsThen:
    """A server's stats and their age."""

    stats: ServerStats
    age_s: float


class ServerFigures(Collector):
    """All of a server's metrics. ``stats`` is called at each scrape, on the scrape's own thread; ``measures``
    are read as they are."""

    def __init__(
        self,
        info: ServerInfo,
        version: str,
        stats: Callable[[], StatsThen | None],
        measures: Measures,
        start_up: StartUp,
    ) -> None:
        self._info = info
        self._version = version
        self._stats = stats
        self._measures = measures
        self._start_up = start_up

    def describe(self) -> list[Metric]:
        """Return nothing. Otherwise a registry would collect to learn the names, before there is a server to
        ask."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._identity()
        yield from _of_start_up(self._start_up)
        yield GaugeMetricFamily(
            "twinfang_rows", "Requests that can run at once, if memory allows.", self._info.max_num_seqs
        )
        then = self._stats()
        if then is not None:
            yield GaugeMetricFamily(
                "twinfang_figures_age_seconds",
                "Age of the figures that only the engine knows; above 0 if it does not answer at once.",
                then.age_s,
            )
            yield from _of_stats(then.stats)
        yield from _of_measures(self._measures)

    def _identity(self) -> Metric:
        labels = {
            "role": self._info.role,
            "model": self._info.served_model_name,
            "incarnation": self._info.incarnation,
            "version": self._version,
        }
        return InfoMetricFamily("twinfang_server", "Who this server is.", labels)


def _of_start_up(start_up: StartUp) -> Iterator[Metric]:
    seconds = GaugeMetricFamily(
        "twinfang_start_up_seconds",
        "Time that this process took to start, by phase; the sum is from its start until it was ready.",
        labels=["phase"],
    )
    for phase, spent_s in start_up.seconds.items():
        seconds.add_metric([phase], spent_s)
    yield seconds
    yield GaugeMetricFamily(
        "twinfang_loaded_weight_bytes",
        "Bytes of the loaded weights, as they are stored.",
        start_up.weight_bytes,
    )


def _of_stats(stats: ServerStats) -> Iterator[Metric]:
    for name, field, text in GAUGES:
        yield GaugeMetricFamily(f"twinfang_{name}", text, getattr(stats, field))
    for name, field, text in COUNTERS:
        yield CounterMetricFamily(f"twinfang_{name}", text, getattr(stats, field))
    yield from handoff_families((), {(): stats})
    yield from speculation_families((), {(): stats})


def _of_measures(measures: Measures) -> Iterator[Metric]:
    yield from _of_steps(measures)
    yield from _of_requests(measures)
    yield from host_cache_families(measures.host_cache)
    yield from file_cache_families(measures.file_cache)
    yield from neighbour_cache_families(measures.neighbour_cache)
    for name, text, tally in (
        ("batch_size", "Requests in a step.", measures.batch_size),
        ("batch_tokens", "Tokens in a step, drafts not counted.", measures.batch_tokens),
        ("request_queue_seconds", "Wait of a request for room.", measures.queue),
        ("prefill_seconds", "Run of a prompt that is handed over, from having room.", measures.prefill),
        ("transfer_seconds", "Reading one prompt's blocks and state from another server.", measures.transfer),
        (
            "time_to_first_token_seconds",
            "From a request's arrival at this server to its first token.",
            measures.time_to_first_token,
        ),
        (
            "inter_token_latency_seconds",
            "Time between two tokens of a request; tokens of one step share the time.",
            measures.inter_token_latency,
        ),
    ):
        family = HistogramMetricFamily(f"twinfang_{name}", text)
        tally.put_into(family)
        yield family


def _of_steps(measures: Measures) -> Iterator[Metric]:
    steps = CounterMetricFamily(
        "twinfang_steps",
        "Steps, by their rows (decode, prefill, mixed) and whether a captured graph ran them (graph, eager).",
        labels=["kind", "run"],
    )
    for (kind, run), count in measures.steps.items():
        steps.add_metric([kind, run], count)
    yield steps
    seconds = HistogramMetricFamily(
        "twinfang_step_seconds",
        "Time of a step, from its launch or, if that is later, the end of the step before.",
        labels=["kind"],
    )
    for kind, tally in measures.step_seconds.items():
        tally.put_into(seconds, [kind])
    yield seconds


def _of_requests(measures: Measures) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "twinfang_requests_ended",
        "Requests that have ended here, by reason: stop, length, cancelled, error, moved (goes on at another "
        "server), prefilled (waits to be read).",
        labels=["reason"],
    )
    for reason, count in measures.ended.items():
        ended.add_metric([reason], count)
    yield ended
    faults = CounterMetricFamily(
        "twinfang_state_faults",
        "Requests ended because their blocks or state were damaged, by what showed it: state (the sanitizer, "
        "before a step), logits (not finite).",
        labels=["found"],
    )
    for found, count in measures.state_faults.items():
        faults.add_metric([found], count)
    yield faults
    yield CounterMetricFamily(
        "twinfang_prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        measures.prompt_tokens_looked_up,
    )
    yield CounterMetricFamily(
        "twinfang_prefix_cache_hits", "Prompt tokens that the prefix cache had.", measures.prompt_tokens_found
    )
    saved = CounterMetricFamily(
        "twinfang_prefix_cache_saved_flops",
        "FLOP of these tokens, by the tier that had them: device, or host for host memory.",
        labels=["tier"],
    )
    for tier, flops in measures.saved_flops.items():
        saved.add_metric([tier], flops)
    yield saved
