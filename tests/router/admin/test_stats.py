"""What the admin API says of the last minute, and of API keys: their use, and how much of their limits is
used."""

import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.access.key_limits import KeyLimits
from router.admin.views.key import KeyLimit, KeyView, merged_keys
from testing.router.admin_calls import get
from testing.router.scripted_router import MODEL
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


async def test_a_key_s_limits_are_shown_with_what_is_used_of_them(make_admin_stack, tmp_path):
    key, path = new_key(), tmp_path / "keys"
    limits = KeyLimits(requests_per_minute=5, tokens_total=1000)
    lines = [key_line(ApiKey("alice", digest_of(key), limits=limits)), key_line(ApiKey("bob", b"b" * 32))]
    path.write_text("\n".join(lines))
    stack = await make_admin_stack(api_keys_file=path)
    stack.decode[0].script = saying([300, 301, 302])
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
    answer = await stack.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    shown = {one["name"]: one for one in (await stack.client.get("/admin/v1/keys")).json()["keys"]}
    assert shown["bob"]["limits"] == []
    used = {limit["name"]: (limit["used"], limit["limit"]) for limit in shown["alice"]["limits"]}
    assert used["tokens_total"][1] == 1000
    assert used["tokens_total"][0] >= answer.json()["usage"]["total_tokens"]
    assert 0 < used["requests_per_minute"][0] <= 1


def test_of_several_processes_the_one_counts_that_has_heard_last():
    def view(used):
        limits = [KeyLimit(name="tokens_total", used=used, limit=10)]
        return KeyView(
            name="a", requests={}, prompt_tokens=1, cached_tokens=0, generated_tokens=1, limits=limits
        )

    (merged,) = merged_keys([view(4), view(7), view(0)])
    assert [limit.used for limit in merged.limits] == [7]
