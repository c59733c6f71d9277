"""A server's page under vLLM's names."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.engine_metrics import Measures
from telemetry.families.vllm import ALIASES, VllmMetrics
from telemetry.server_metrics import ServerFigures, StatsThen
from telemetry.start_up import StartUp
from testing.router.scripted_servers import server_info, server_stats


def page_of(stats):
    measures = Measures()
    measures.ended["stop"], measures.ended["cancelled"], measures.ended["moved"] = 5, 2, 9
    measures.time_to_first_token.add(0.3)
    measures.inter_token_latency.add(0.02, 4)
    info = server_info("decode")
    figures = ServerFigures(info, "1", lambda: stats and StatsThen(stats, 0.0), measures, StartUp())
    registry = CollectorRegistry()
    registry.register(VllmMetrics(figures, info))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


MODEL = ("model_name", "tiny")
STATS = server_stats(
    num_running=3, num_waiting=2, num_blocks=40, free_blocks=30, prefill_tokens=70, decode_tokens=11
)


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("num_requests_running", (), 3),
        ("num_requests_waiting", (), 2),
        ("kv_cache_usage_perc", (), 0.25),
        ("gpu_cache_usage_perc", (), 0.25),
        ("prompt_tokens_total", (), 70),
        ("generation_tokens_total", (), 11),
        ("request_success_total", (("finished_reason", "stop"),), 5),
        ("request_success_total", (("finished_reason", "abort"),), 2),
        ("time_to_first_token_seconds_count", (), 1),
        ("time_to_first_token_seconds_sum", (), 0.3),
        ("time_to_first_token_seconds_bucket", (("le", "0.5"),), 1),
        ("inter_token_latency_seconds_count", (), 4),
        ("time_per_output_token_seconds_count", (), 4),
    ],
)
def test_a_metric_has_vllm_s_name_label_and_our_value(name, labels, value):
    assert page_of(STATS)[(f"vllm:{name}", *sorted((*labels, MODEL)))] == value


def test_ours_are_shown_too_and_reasons_that_vllm_lacks_are_not():
    page = page_of(STATS)
    assert page[("twinfang_requests_ended_total", ("reason", "moved"))] == 9
    reasons = {key[1][1] for key in page if key[0] == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}
    assert page[("vllm:cache_config_info", ("block_size", "16"), ("num_gpu_blocks", "40"))] == 1


def test_a_model_without_kv_uses_nothing_of_it():
    assert page_of(server_stats())[("vllm:kv_cache_usage_perc", MODEL)] == 0


def test_every_alias_is_of_a_metric_that_servers_show():
    names = {key[0] for key in page_of(STATS)}
    for ours in ALIASES:
        assert names & {ours, f"{ours}_total", f"{ours}_count"}, ours


def test_an_engine_that_does_not_answer_leaves_its_metrics_out():
    names = {key[0] for key in page_of(None)}
    assert "vllm:num_requests_running" not in names
    assert "vllm:kv_cache_usage_perc" not in names
    assert "vllm:time_to_first_token_seconds_count" in names
