"""A server's metrics under vLLM's names too, for dashboards and endpoint pickers that read those.

``--vllm-metrics`` puts this collector in the place of the server's own. Each metric of :data:`ALIASES` is
shown twice, the second time with vLLM's label ``model_name``. Histograms keep the server's buckets.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wire.messages.generation import ServerInfo

ALIASES = {
    "twinfang_requests_running": ("num_requests_running",),
    "twinfang_requests_waiting": ("num_requests_waiting",),
    "twinfang_preemptions": ("num_preemptions",),
    "twinfang_prefill_tokens": ("prompt_tokens",),
    "twinfang_generation_tokens": ("generation_tokens",),
    "twinfang_prefix_cache_queries": ("prefix_cache_queries",),
    "twinfang_prefix_cache_hits": ("prefix_cache_hits",),
    "twinfang_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "twinfang_inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "twinfang_request_queue_seconds": ("request_queue_time_seconds",),
    "twinfang_requests_ended": ("request_success",),
}
"""Our families, without ``_total``, and vLLM's names for them, without ``vllm:``."""
FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Reasons of :data:`telemetry.engine_metrics.End` that vLLM knows, with vLLM's names."""
USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
"""Names of the share of KV blocks in use, from 0 to 1: today's and that of vLLM before 0.10."""


class VllmMetrics(Collector):
    """Collects ``figures``, and after each of its families the family's aliases."""

    def __init__(self, figures: Collector, info: ServerInfo) -> None:
        self._figures = figures
        self._info = info

    def describe(self) -> list[Metric]:
        """Return nothing, like the server's own collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        blocks: dict[str, float] = {}
        for family in self._figures.collect():
            yield family
            for alias in ALIASES.get(family.name, ()):
                yield self._renamed(family, f"vllm:{alias}")
            if family.name in ("twinfang_kv_blocks", "twinfang_kv_blocks_free"):
                blocks[family.name] = family.samples[0].value
        if blocks:
            yield from self._of_blocks(blocks["twinfang_kv_blocks"], blocks["twinfang_kv_blocks_free"])

    def _renamed(self, family: Metric, name: str) -> Metric:
        alias = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {"model_name": self._info.served_model_name} | sample.labels
            if "reason" in labels:
                reason = FINISHED_REASONS.get(labels.pop("reason"))
                if reason is None:
                    continue
                labels["finished_reason"] = reason
            alias.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
        return alias

    def _of_blocks(self, num_blocks: float, num_free: float) -> Iterator[Metric]:
        share = 1 - num_free / num_blocks if num_blocks else 0.0
        for name in USAGE:
            usage = GaugeMetricFamily(f"vllm:{name}", "Share of KV blocks in use.", labels=["model_name"])
            usage.add_metric([self._info.served_model_name], share)
            yield usage
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache.", labels=["block_size", "num_gpu_blocks"]
        )
        config.add_metric([str(self._info.block_size), f"{num_blocks:.0f}"], 1)
        yield config
