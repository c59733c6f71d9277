import pytest

from testing.router.admin_calls import get
from testing.router.scripted_servers import saying


async def test_stats_are_of_the_last_minute(make_admin_stack):
    stack = await make_admin_stack()
    empty = await get(stack, "/stats")
    assert (empty["ttft_ms"]["p50"], empty["ttft_ms"]["histogram"], empty["cache_hit_rate"]) == (
        None,
        [],
        None,
    )
    stack.decode[0].script = saying([300, 301, 302])
    for _ in range(4):
        assert (await stack.complete(prompt=[5, 6, 7, 8], max_tokens=3)).status_code == 200
    stats = await get(stack, "/stats")
    assert (stats["window_s"], stats["in_flight"], stats["queued"]) == (60, 0, 0)
    rates = stats["throughput"]
    assert rates["prompt_tokens_per_s"] == pytest.approx(4 * rates["requests_per_s"], rel=0.01)
    assert rates["generated_tokens_per_s"] == pytest.approx(3 * rates["requests_per_s"], rel=0.01)
    for latency in (stats["ttft_ms"], stats["tpot_ms"]):
        assert sum(count for _, count in latency["histogram"]) == 4
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    assert stats["cache_hit_rate"] == 1.0
    assert stats["transfer"]["bytes_per_s"] > 0
