import asyncio
import os
import signal
import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.app import create_app
from router.config import ModelSource, RouterConfig
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import MODEL, why_not_ready
from testing.router.scripted_servers import MAX_MODEL_LEN, ScriptedDecode, saying, server_info
from testing.router.tokenizers import write_model_dir
from twinfang.stack.ports import free_ports
from wire.errors import ConfigError, ModelLoadError

RUN_ROUTER = """
import sys
from pathlib import Path
from router.config import ModelSource, RouterConfig
from router.main import run
run(RouterConfig(models=(ModelSource("tiny", Path(sys.argv[1])),), decode_addresses=(sys.argv[2],),
                 port=int(sys.argv[3]), probe_interval_s=0.1))
assert "torch" not in sys.modules, "the router imported torch"
"""


async def test_the_model_is_listed_with_its_context_length(make_stack):
    stack = await make_stack()
    listed = (await stack.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", MAX_MODEL_LEN)
    assert (await stack.client.get(f"/v1/models/{MODEL}")).json() == card
    assert [model.id async for model in stack.openai.models.list()] == [MODEL]


async def test_a_router_is_alive_before_it_is_ready(make_stack):
    stack = await make_stack(ready=False)
    await stack.decode[0].stop()
    await until(lambda: stack.services.pool.num_connected() == {"prefill": 1, "decode": 0})
    assert (await stack.client.get("/healthz")).status_code == 200
    waiting = await stack.client.get("/readyz")
    assert waiting.status_code == 503
    assert "no decode server is ready" in waiting.json()["error"]["message"]
    assert stack.decode[0].address in why_not_ready(stack)
    await stack.decode[0].start()
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    assert (await stack.client.get("/readyz")).status_code == 200


async def test_metrics_count_requests_tokens_and_transfers(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300, 301, 302])
    assert (await stack.complete(prompt=[5, 6, 7, 8], n=2)).status_code == 200
    assert (await stack.complete(prompt=[VOCAB := 10**6, VOCAB])).status_code == 400
    text = (await stack.client.get("/metrics")).text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["twinfang_requests_total", "completed"] == 1
    assert samples["twinfang_requests_in_flight",] == 0
    assert samples["twinfang_prompt_tokens_total",] == 4
    assert samples["twinfang_cached_prompt_tokens_total",] == 4
    assert samples["twinfang_generation_tokens_total",] == 6
    assert samples["twinfang_time_to_first_token_seconds_count",] == 2
    assert samples["twinfang_request_duration_seconds_count",] == 1
    assert samples["twinfang_transfer_bytes_total",] == 2000
    assert samples["twinfang_transfer_seconds_count",] == 2
    assert samples["twinfang_transfer_descriptors_total",] == 6
    assert samples["twinfang_prefill_seconds_count",] == 1, "both choices share it"
    assert samples["twinfang_prefill_rpc_seconds_count",] == 1
    for rest in ("decode_rpc", "decode_first_token"):
        assert samples[f"twinfang_{rest}_seconds_count",] == 2
    assert samples["twinfang_decode_queue_seconds_count",] == 2
    assert samples["twinfang_servers_connected", "decode"] == 1


async def test_the_schema_describes_the_body(make_stack):
    stack = await make_stack()
    schema = (await stack.client.get("/openapi.json")).json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "max_tokens", "stop", "ignore_eos"} <= body["properties"].keys()


def test_a_model_folder_without_tokenizer_is_refused_at_the_start(tmp_path):
    config = RouterConfig(models=(ModelSource("tiny", tmp_path),), decode_addresses=("localhost:1",))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        create_app(config)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"decode_addresses": ()}, "at least one decode server"),
        ({"decode_addresses": ("localhost",)}, "host:port"),
        ({"decode_addresses": ("localhost:99999",)}, "host:port"),
        ({"decode_addresses": ("a:1", "a:1")}, "twice"),
        ({"prefill_addresses": (":5",)}, "host:port"),
        ({"port": -1}, "port"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"request_timeout_s": -1.0}, "request_timeout_s"),
    ],
)
def test_settings_that_can_not_work_are_refused(tmp_path, changes, part):
    settings = {"models": (ModelSource("tiny", tmp_path),), "decode_addresses": ("localhost:1",)}
    with pytest.raises(ConfigError, match=part):
        RouterConfig(**(settings | changes))


async def test_a_process_serves_without_torch_and_ends_cleanly_on_sigterm(tmp_path):
    decode = ScriptedDecode(server_info("both"), script=saying([300, 301]))
    await decode.start()
    (port,) = free_ports(1)
    arguments = [str(write_model_dir(tmp_path / "model")), decode.address, str(port)]
    process = subprocess.Popen([sys.executable, "-c", RUN_ROUTER, *arguments], env={**os.environ})
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:

            async def ready() -> bool:
                try:
                    return (await client.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            async with asyncio.timeout(TIMEOUT_S):
                while not await ready():
                    await asyncio.sleep(0.05)
            answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
            assert answer.status_code == 200
            decode.script = saying([300] * 50)
            async with client.stream(
                "POST", "/v1/completions", json={"prompt": "hello", "max_tokens": 50, "stream": True}
            ) as stream:
                process.send_signal(signal.SIGTERM)  # an answer under way is finished first
                assert "data: [DONE]" in (await stream.aread()).decode()
        assert await asyncio.to_thread(process.wait, TIMEOUT_S) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        await decode.stop()
