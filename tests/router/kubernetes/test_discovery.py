"""A router follows pods, with real HTTP from an API server and real gRPC to servers."""

import asyncio
import dataclasses
import statistics
import sys
import time
from contextlib import suppress

import httpx
import pytest

from router.config import PodDiscovery
from testing.command_lines import BY_NAME, parsed
from testing.conditions import TIMEOUT_S, until
from testing.deploy.kubernetes_api import NAMESPACE
from testing.router.scripted_servers import ScriptedDecode, hanging, saying, server_info, server_stats
from testing.router.tokenizers import write_model_dir
from twinfang.stack.ports import free_ports
from wire.errors import ConfigError
from wire.messages.generation import RequestOutput

FOLLOWS_S = 1.0


async def ask(cloud, **body):
    response = await cloud.stack.complete(**({"prompt": [5, 6, 7], "max_tokens": 2} | body))
    return response.status_code


async def test_a_router_starts_without_servers_and_serves_once_there_are_pods(make_cloud):
    cloud = await make_cloud()
    await until(lambda: not cloud.pods.problem)
    not_ready = await cloud.stack.client.get("/readyz")
    assert (not_ready.status_code, await ask(cloud)) == (503, 503)
    cloud.add("prefill-0", cloud.stack.prefill[0])
    cloud.add("decode-0", cloud.stack.decode[0], ready=False)
    await until(lambda: cloud.in_use() == {cloud.stack.prefill[0].address})
    assert await ask(cloud) == 503
    cloud.api.set_ready("decode-0", True)
    await until(lambda: cloud.pool.not_ready_reason() is None)
    assert (await ask(cloud), len(cloud.stack.prefill[0].requests)) == (200, 1)
    assert [worker.added_by for worker in cloud.pool.workers()] == ["discovery"] * 2


async def test_a_prompt_is_computed_near_its_decode_server_and_an_answer_moves_to_a_near_one(make_cloud):
    policies = {"prefill_policy": "prefix_affinity", "decode_policy": "least_loaded"}
    cloud = await make_cloud(num_prefill=4, num_decode=4, **policies)

    async def lets_go(submit, send):
        if submit.num_answered:
            await saying([301])(submit, send)
            return
        send(RequestOutput(submit.request_id, (300,)))
        kept = dataclasses.replace(submit.ticket, address="decode", num_tokens=len(submit.token_ids))
        send(RequestOutput(submit.request_id, (), finish_reason="moved", ticket=kept))

    zones = {}
    for server in (*cloud.stack.prefill, *cloud.stack.decode):
        zones[server.address] = f"z{len(zones) % 2}"
        labels = {"topology.kubernetes.io/zone": zones[server.address]}
        server.stats = server_stats(num_blocks=1000, free_blocks=1000)
        cloud.add(f"pod-{len(zones)}", server, labels=labels)
    for server in cloud.stack.decode:
        server.script = lets_go
    await until(lambda: cloud.in_use() == zones.keys())
    await until(lambda: all(known.stats for _, _, known in cloud.pool.assignments()))  # equally idle
    for _ in range(12):
        assert await ask(cloud) == 200
    where = {}
    for server in (*cloud.stack.prefill, *cloud.stack.decode):
        for request in server.requests if server in cloud.stack.prefill else server.submitted:
            where.setdefault(request.request_id.partition("~")[0], []).append(zones[server.address])
    assert {len(one) for one in where.values()} == {3}, "computed, begun, moved"
    assert {tuple(set(one)) for one in where.values()} == {("z0",), ("z1",)}


async def test_pods_that_were_there_before_the_router_are_found(make_cloud):
    server = ScriptedDecode(server_info("both"), script=saying([300]))
    await server.start()
    for page_size in (None, 1):

        def start(api, page_size=page_size):
            api.page_size = page_size
            for name in {"a", "b", "c"} - set(api.pod_names):
                api.create_pod(name, port=server.port if name == "b" else 1)

        cloud = await make_cloud(start=start, num_prefill=0, num_decode=0)
        await until(lambda cloud=cloud: cloud.in_use() == {server.address})
        assert cloud.workers().keys() == {server.address, "127.0.0.1:1"}
    await server.stop()


async def test_a_router_follows_within_a_second(make_cloud):
    cloud = await make_cloud(role="both")
    (server,), api, took = cloud.stack.decode, cloud.api, []
    address = server.address

    async def followed(condition):
        began = time.monotonic()
        await until(condition)
        took.append(time.monotonic() - began)

    for _ in range(3):
        server.info, server.drains[:] = dataclasses.replace(server.info, is_draining=False), []
        cloud.add("decode-0", server)
        await followed(lambda: cloud.in_use() == {address})
        api.set_ready("decode-0", False)
        await followed(lambda: not cloud.in_use())
        api.set_ready("decode-0", True)
        await followed(lambda: cloud.in_use() == {address})
        api.delete_pod("decode-0")
        await followed(lambda: not cloud.in_use())
        await until(lambda: server.drains)
        api.end_pod("decode-0")
        await followed(lambda: not cloud.workers())
    assert statistics.median(took) < FOLLOWS_S, took


async def test_a_pod_that_turns_unready_gets_nothing_and_finishes_what_it_has(make_cloud):
    cloud = await make_cloud(num_decode=2, role="both")
    first, second = cloud.stack.decode
    first.script = hanging
    cloud.add("a", first)
    await until(lambda: cloud.in_use() == {first.address})
    asked = asyncio.create_task(ask(cloud, max_tokens=1))
    await until(lambda: first.submitted)
    cloud.add("b", second)
    cloud.api.set_ready("a", False)
    await until(lambda: cloud.in_use() == {second.address})
    for _ in range(6):
        assert await ask(cloud) == 200
    assert (len(first.submitted), first.cancelled, first.drains) == (1, [], [])
    assert "pod a is not ready" in cloud.workers()[first.address].problem
    first.send(*_last_output(first.submitted[0].request_id))
    assert await asked == 200
    cloud.api.set_ready("a", True)
    await until(lambda: cloud.in_use() == {first.address, second.address})


def _last_output(request_id):
    return [RequestOutput(request_id, (51,), finish_reason="length")]


async def test_a_terminating_pod_gets_no_request_under_load(make_cloud):
    cloud = await make_cloud(num_prefill=3, num_decode=3)
    servers = {f"p{i}": one for i, one in enumerate(cloud.stack.prefill)}
    servers |= {f"d{i}": one for i, one in enumerate(cloud.stack.decode)}
    for name, server in servers.items():
        cloud.add(name, server)
    await until(lambda: len(cloud.in_use()) == 6)
    statuses, is_over = [], False

    async def keep_asking():
        while not is_over:
            statuses.append(await ask(cloud))

    def given(name):
        """Attempts that the router has given to this server: what it has not received yet is among them."""
        return cloud.workers()[servers[name].address].assignments.chosen_by.total()

    asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
    counts = {}
    for name in ("p0", "d0", "d1", "p1"):
        await until(lambda name=name: given(name) > 3)
        cloud.api.delete_pod(name)
        await until(lambda name=name: servers[name].address not in cloud.in_use())
        counts[name] = given(name)
        num_answers = len(statuses)
        await until(lambda num=num_answers: len(statuses) > num + 40)
    assert {name: given(name) for name in counts} == counts
    is_over = True
    await asyncio.gather(*asking)
    assert set(statuses) == {200}


async def test_what_runs_in_a_pod_that_is_deleted_is_let_go_once_there_is_another(make_cloud):
    cloud = await make_cloud(num_decode=2)
    first, second = cloud.stack.decode
    cloud.add("p", cloud.stack.prefill[0])
    cloud.add("a", first)
    cloud.add("b", second)
    await until(lambda: len(cloud.in_use()) == 3)
    cloud.api.delete_pod("a")
    await until(lambda: first.drains)
    assert [(told.is_draining, told.lets_go) for told in first.drains] == [(True, True)]
    cloud.api.delete_pod("b")
    await until(lambda: second.drains)
    assert [(told.is_draining, told.lets_go) for told in second.drains] == [(True, False)]
    assert await ask(cloud) == 503
    assert cloud.workers().keys() == {one.address for one in (*cloud.stack.prefill, first, second)}
    cloud.api.end_pod("a")
    cloud.api.end_pod("b")
    await until(lambda: cloud.workers().keys() == {cloud.stack.prefill[0].address})


async def test_a_pod_restarted_with_the_same_ip_is_another_server(make_cloud):
    cloud = await make_cloud(role="both")
    (server,) = cloud.stack.decode
    cloud.add("a", server)
    await until(lambda: cloud.in_use() == {server.address})
    before = cloud.workers()[server.address]
    cloud.api.delete_pod("a")
    await until(lambda: server.drains)
    await server.stop()
    server.info = dataclasses.replace(server.info, incarnation="second", is_draining=False)
    await server.start()
    cloud.api.end_pod("a")
    cloud.add("a", server)
    await until(lambda: cloud.in_use() == {server.address})
    now = cloud.workers()[server.address]
    assert now is not before
    assert now.info.incarnation == "second"
    assert (await ask(cloud), len(server.drains)) == (200, 1)


async def test_another_process_at_a_deleted_pod_s_address_is_neither_used_nor_told(make_cloud):
    cloud = await make_cloud(role="both")
    (server,) = cloud.stack.decode
    cloud.add("a", server)
    await until(lambda: cloud.in_use() == {server.address})
    cloud.api.delete_pod("a")
    await until(lambda: server.drains)
    await server.stop()
    await until(lambda: cloud.workers()[server.address].info is None)
    await cloud.api.stop()
    server.info = dataclasses.replace(server.info, incarnation="second", is_draining=False)
    await server.start()
    await until(lambda: cloud.workers()[server.address].info is not None)
    assert (cloud.in_use(), len(server.drains), await ask(cloud)) == (set(), 1, 503)
    await cloud.api.start()
    cloud.api.end_pod("a")
    cloud.add("b", server)
    await until(lambda: cloud.in_use() == {server.address})
    assert await ask(cloud) == 200


async def test_a_container_restarted_in_its_pod_is_the_same_server(make_cloud):
    cloud = await make_cloud(role="both")
    (server,) = cloud.stack.decode
    cloud.add("a", server)
    await until(lambda: cloud.in_use() == {server.address})
    worker = cloud.workers()[server.address]
    cloud.api.set_ready("a", False)
    await server.stop()
    server.info = dataclasses.replace(server.info, incarnation="second")
    await server.start()
    cloud.api.set_ready("a", True)
    await until(lambda: cloud.in_use() and worker.info.incarnation == "second")
    assert cloud.workers() == {server.address: worker}


async def neighbours(number):
    """Servers on ports next to one another."""
    while True:
        (port,) = free_ports(1)
        servers = [
            ScriptedDecode(server_info("both"), port=port + i, script=saying([300])) for i in range(number)
        ]
        started = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
        if not any(started):
            return servers
        for server, error in zip(servers, started, strict=True):
            if error is None:
                await server.stop()


async def test_several_servers_of_one_pod_come_and_go_with_it(make_cloud):
    cloud = await make_cloud(num_decode=0)
    servers = await neighbours(3)
    first, last = servers[0], servers[-1]
    cloud.api.create_pod("ranks", port=f"{first.port}-{last.port}", ready=False)
    cloud.api.set_ready("ranks", True)
    await until(lambda: cloud.in_use() == {server.address for server in servers})
    for _ in range(24):
        assert await ask(cloud) == 200
    assert all(server.submitted for server in servers)
    cloud.api.set_ready("ranks", False)
    await until(lambda: not cloud.in_use())
    cloud.api.set_label("ranks", "twinfang.io/port", f"{first.port}-{last.port - 1}")
    cloud.api.set_ready("ranks", True)
    await until(lambda: cloud.in_use() == {server.address for server in servers[:-1]})
    assert last.address not in cloud.workers(), "the label names it no more"
    cloud.api.delete_pod("ranks")
    await until(lambda: all(server.drains for server in servers[:-1]))
    cloud.api.end_pod("ranks")
    await until(lambda: not cloud.workers())
    for server in servers:
        await server.stop()


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
async def test_a_pod_whose_phase_is_final_is_gone(make_cloud, phase):
    cloud = await make_cloud(role="both")
    cloud.add("a", cloud.stack.decode[0])
    await until(cloud.in_use)
    cloud.api.set_status("a", phase=phase)
    await until(lambda: not cloud.workers())


async def test_pods_that_are_not_ours_are_left_alone(make_cloud, caplog):
    caplog.set_level("INFO")
    cloud = await make_cloud(role="both")
    port = cloud.stack.decode[0].port
    cloud.api.create_pod("other-model", port=port, model="large")
    cloud.api.create_pod("no-port", port="grpc")
    cloud.api.create_pod("no-role", labels={"twinfang.io/role": "router"}, port=port)
    cloud.api.set_label("no-role", "twinfang.io/role", None)
    cloud.add("ours", cloud.stack.decode[0], model="tiny")
    await until(lambda: cloud.workers().keys() == {cloud.stack.decode[0].address})
    said = [record.message for record in caplog.records]
    assert any("no-port" in line and "'grpc'" in line for line in said)
    assert any("other-model" in line and "'large'" in line for line in said)
    cloud.api.set_label("ours", "twinfang.io/role", None)  # it leaves the watch
    await until(lambda: not cloud.workers())


async def test_an_ipv6_pod_is_reached(make_cloud):
    cloud = await make_cloud(num_decode=0)
    server = ScriptedDecode(server_info("both"), host="::1", script=saying([300]))
    try:
        await server.start()
    except RuntimeError:
        pytest.skip("this machine has no IPv6")
    cloud.api.create_pod("six", port=server.port, ip="::1")
    await until(lambda: cloud.in_use() == {f"[::1]:{server.port}"})
    assert await ask(cloud) == 200
    await server.stop()


async def test_what_flags_and_operators_say_of_a_server_holds(make_cloud, tmp_path):
    token = tmp_path / "token"
    token.write_text("x" * 40)
    cloud = await make_cloud(num_decode=2, role="both", admin_token_file=token, state_file=tmp_path / "state")
    client = cloud.stack.client
    client.headers["Authorization"] = f"Bearer {'x' * 40}"
    first, second = cloud.stack.decode
    added = await client.post("/admin/v1/workers", json={"address": first.address, "role": "decode"})
    assert added.status_code == 201
    cloud.add("a", first)
    cloud.add("b", second)
    await until(lambda: cloud.in_use() == {first.address, second.address})
    cloud.api.end_pod("a")
    workers = cloud.workers()
    assert (await client.delete(f"/admin/v1/workers/{workers[second.address].worker_id}")).status_code == 200
    cloud.api.set_ready("b", False)
    cloud.api.set_ready("b", True)
    cloud.api.say_gone()
    await until(lambda: cloud.api.num_watches and cloud.pods.metrics.relists["gone"])
    assert cloud.workers() == {first.address: workers[first.address]}
    cloud.api.end_pod("b")
    cloud.add("b", second)
    await until(lambda: second.address in cloud.in_use())
    cloud.api.delete_pod("b")
    await until(lambda: second.drains)
    worker = cloud.workers()[second.address].worker_id
    refused = await client.post(f"/admin/v1/workers/{worker}/undrain")
    assert refused.status_code == 409
    assert "pod b is being deleted" in refused.json()["error"]["message"]
    assert first.address in cloud.in_use()
    assert second.address not in cloud.in_use()


async def test_each_of_several_processes_watches_on_its_own(api, tmp_path):
    server = ScriptedDecode(server_info("both"), script=saying([300, 301]))
    await server.start()
    api.create_pod("a", port=server.port)
    model = write_model_dir(tmp_path / "tiny")
    (model / "config.json").write_text("{}")
    (port,) = free_ports(1)
    flags = ["--kubernetes-namespace", NAMESPACE, "--kubeconfig", str(api.kubeconfig(tmp_path / "kube"))]
    flags += ["--workers", "2", "--port", str(port), "--model", str(model)]
    parent = await asyncio.create_subprocess_exec(sys.executable, "-m", "twinfang", "router", *flags)
    url = f"http://127.0.0.1:{port}/metrics"
    lines = [f'twinfang_discovery_pods{{process="{i}",state="ready"}} 1.0' for i in range(2)]
    lines += [f'twinfang_servers_connected{{process="{i}",role="decode"}} 1.0' for i in range(2)]

    async def missing():
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                text = (await client.get(url)).text
                return [line for line in lines if line not in text]
        return lines

    try:
        async with asyncio.timeout(TIMEOUT_S):
            while await missing():
                await asyncio.sleep(0.05)
        assert api.num_watches == 2
    finally:
        parent.terminate()
        assert await asyncio.wait_for(parent.wait(), TIMEOUT_S) == 0
        await server.stop()


def test_a_kubeconfig_alone_says_nothing(tmp_path):
    (tmp_path / "kubeconfig").write_text("{}")
    for given, match in (
        (["--kubeconfig", str(tmp_path / "kubeconfig"), "--decode", "a:1"], "give --kubernetes-namespace"),
        ([], "--kubernetes-namespace NS"),
        (["--kubernetes-namespace", "Not A Name"], "no name of a namespace"),
    ):
        with pytest.raises(ConfigError, match=match):
            BY_NAME["router"].prepare(parsed(BY_NAME["router"], *given))
    assert PodDiscovery("a").selector == "twinfang.io/role"
