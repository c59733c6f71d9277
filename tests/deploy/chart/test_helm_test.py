"""``helm test``: its pod's own command against a router over HTTP, and whom network policies let it reach."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.config import ModelSource, RouterConfig
from testing.conditions import until
from testing.deploy.helm import Manifest, of_kind, render
from testing.router.scripted_router import MODEL, running_router
from testing.router.scripted_servers import ScriptedDecode, ScriptedPrefill, saying, server_info
from testing.router.tokenizers import write_model_dir


async def test_it_asks_each_model_for_a_completion_and_fails_if_none_comes(tmp_path: Path) -> None:
    (pod,) = of_kind(render(), "Pod").values()
    key = new_key()
    (tmp_path / "keys").write_text(key_line(ApiKey("alice", digest_of(key))), encoding="utf-8")
    async with AsyncExitStack() as exits:
        prefill, decode = ScriptedPrefill(server_info("prefill")), ScriptedDecode(server_info("decode"))
        decode.script = saying([300, 301])
        for server in (prefill, decode):
            exits.push_async_callback(server.stop)
            await server.start()
        config = RouterConfig(
            api_keys_file=tmp_path / "keys",
            models=(ModelSource(MODEL, write_model_dir(tmp_path / "model")),),
            prefill_addresses=(prefill.address,),
            decode_addresses=(decode.address,),
            probe_interval_s=0.1,
        )
        url, app = await exits.enter_async_context(running_router(config))
        await until(lambda: app.state.services.pool.not_ready_reason() is None)
        code, said = await ran(pod, URL=url, API_KEY=key)
        assert (code, said.startswith(f"{MODEL}: 2 tokens")) == (0, True), said
        code, said = await ran(pod, URL=url)
        assert (code, "No completion was tried: test.apiKey names none" in said) == (0, True), said
        code, said = await ran(pod, URL=url, API_KEY="twinfang-wrong")
        assert (code, said.startswith(f"{url}/v1/models: 401 ")) == (1, True), said
    code, said = await ran(pod, URL=url)
    assert (code, "refused" in said) == (1, True), said


async def ran(pod: Manifest, **variables: str) -> tuple[int | None, str]:
    """Run the pod's command on this machine; return its exit status and what it said."""
    (container,) = pod["spec"]["containers"]
    process = await asyncio.create_subprocess_exec(
        *(*container["command"], *container["args"]),
        env=os.environ | {"TIMEOUT_S": "20"} | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


def test_its_pod_reaches_routers_though_clients_are_named_and_gets_the_key() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}]
    values = {
        "networkPolicy": {"clients": clients},
        "test": {"apiKey": {"existingSecret": "alice"}},
        "router": {"service": {"port": 8080}, "flags": {"request-timeout": 900}},
    }
    manifests = render(values)
    (pod,) = of_kind(manifests, "Pod").values()
    policies = of_kind(manifests, "NetworkPolicy")
    let_in = [
        peer["podSelector"]["matchLabels"] for peer in peers_of_routers(policies) if "podSelector" in peer
    ]
    assert [labels for labels in let_in if labels.items() <= pod["metadata"]["labels"].items()]
    own = policies["test"]["spec"]
    assert own["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    variables = {one["name"]: one for one in container["env"]}
    (service,) = (one for name, one in of_kind(manifests, "Service").items() if name == "router")
    assert variables["URL"]["value"] == f"http://{service['metadata']['name']}:8080"
    assert float(variables["TIMEOUT_S"]["value"]) == 900
    assert variables["API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "alice", "key": "key"}
    for manifest in (pod, policies["test"]):
        assert manifest["metadata"]["annotations"]["helm.sh/hook"] == "test"


def peers_of_routers(policies: dict[str, Manifest]) -> list[Manifest]:
    (rule,) = policies["router"]["spec"]["ingress"]
    peers: list[Manifest] = rule["from"]
    return peers
