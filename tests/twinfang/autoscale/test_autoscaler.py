"""The loop over HTTP: pages in, decisions out, Deployments scaled if that is wanted."""

import asyncio
import signal
import socket
import sys

import httpx
import pytest

from testing.autoscale.metrics_pages import FakeRouter, FakeServer
from testing.command_lines import BY_NAME, parsed
from testing.deploy.kubernetes_api import NAMESPACE, running_api
from twinfang.autoscale.autoscaler import Autoscaler
from twinfang.autoscale.needs import Objectives
from twinfang.autoscale.pool_planner import PlannerPace, PoolLimits
from twinfang.autoscale.settings import AutoscaleConfig, PoolSource
from twinfang.stack.ports import free_ports
from wire.errors import ConfigError

LOOK_S = 15.0


class Fleet:
    """One router, a prefill and a decode server, their Deployments; a planner whose clock a test moves."""

    def __init__(self, pages, api, kubeconfig, **settings):
        self.api = api
        self.router, self.prefill, self.decode = FakeRouter(pages), FakeServer(pages), FakeServer(pages)
        api.replicas = {"pre": 1, "dec": 1}
        self.said, self.now_s = [], 1000.0
        config = {
            "router_urls": (self.router.url,),
            "prefill": PoolSource("prefill", (self.prefill.url,), PoolLimits(1, 8), "pre"),
            "decode": PoolSource("decode", (self.decode.url,), PoolLimits(1, 8), "dec"),
            "objectives": Objectives(0.5, 0.025, 0.2),
            "pace": PlannerPace(30.0, 60.0),
            "namespace": NAMESPACE,
            "kubeconfig": kubeconfig,
            "applies": True,
        }
        self.planner = Autoscaler(
            AutoscaleConfig(**(config | settings)), say=self.said.append, clock=lambda: self.now_s
        )

    async def look(self, num=1, *, prompts=0, running=0.0):
        """A look every 15 s, with so many prompts of 100 ms in between."""
        for _ in range(num):
            for _ in range(prompts):
                self.prefill.steps.observe(0.1)
                self.prefill.prefill.observe(0.1)
                self.router.ttft.observe(0.15)
                self.router.queue.observe(0.001)
            if running:
                self.decode.batch.observe(running)
                self.router.tpot.observe(0.01)
            self.decode.running.set(running)
            self.now_s += LOOK_S
            await self.planner.look()

    def patched(self):
        return [request for request in self.api.requests if request.verb == "patch"]


@pytest.fixture
async def make_fleet(pages, tmp_path):
    async with running_api() as api:
        yield lambda **settings: Fleet(pages, api, api.kubeconfig(tmp_path / "kubeconfig"), **settings)


async def test_a_pool_grows_with_its_load_and_shrinks_once_that_has_gone(make_fleet):
    fleet = make_fleet()
    await fleet.look(2)
    assert (fleet.api.replicas, fleet.patched()) == ({"pre": 1, "dec": 1}, [])
    await fleet.look(4, prompts=145)
    assert fleet.api.replicas == {"pre": 2, "dec": 1}
    assert any(line.startswith("prefill 1 -> 2: prompts keep ") for line in fleet.said)
    await fleet.look(10)
    assert fleet.api.replicas == {"pre": 1, "dec": 1}
    assert len(fleet.patched()) == 2


async def test_routers_that_show_metrics_to_a_role_alone_are_read_with_a_token(
    make_fleet, pages, tmp_path, caplog
):
    file = tmp_path / "token"
    file.write_text("first\n")
    fleet = make_fleet(router_token_file=file)
    pages.tokens[fleet.router.url] = "first"
    await fleet.look(2)
    pages.tokens[fleet.router.url] = "second"
    file.write_text("second\n")
    await fleet.look(4, prompts=145)
    assert fleet.api.replicas == {"pre": 2, "dec": 1}
    file.write_text("")
    await fleet.look()
    assert "has no token: it should have one line" in caplog.text
    assert "it answers 401" not in caplog.text, "the last token is shown"
    with pytest.raises(ConfigError, match=r"`router_token_file` .* has no token"):
        make_fleet(router_token_file=file)


async def test_a_router_that_refuses_is_named_with_what_it_takes(make_fleet, pages, caplog):
    fleet = make_fleet()
    pages.tokens[fleet.router.url] = "first"
    await fleet.look()
    assert "it answers 401: give --router-token-file a key that has the role view there" in caplog.text


async def test_decode_servers_follow_the_requests_that_run(make_fleet):
    fleet = make_fleet()
    await fleet.look(6, running=7.5)
    assert fleet.api.replicas["dec"] == 2
    assert any("decode 1 -> 2: " in line and "--max-num-seqs" in line for line in fleet.said), fleet.said
    await fleet.look(5, running=14.0)
    assert fleet.api.replicas["dec"] == 2, "the second one does not serve yet"
    assert "3 are needed, and 1 do not serve yet" in fleet.said[-1]


async def test_a_dry_run_writes_nothing_and_says_what_it_would_do_once(make_fleet):
    fleet = make_fleet(applies=False)
    await fleet.look(6, prompts=145, running=7.5)
    assert (fleet.api.replicas, fleet.patched()) == ({"pre": 1, "dec": 1}, [])
    assert {request.verb for request in fleet.api.requests} == {"get"}
    assert len([line for line in fleet.said if line.startswith("prefill 1 -> 2 (dry run): ")]) == 1


async def test_without_deployments_sizes_are_what_metrics_show_and_kubernetes_is_not_asked(make_fleet, pages):
    fleet = make_fleet()
    more = FakeServer(pages)
    urls = (fleet.prefill.url, more.url)
    fleet = make_fleet(
        applies=False,
        namespace="",
        prefill=PoolSource("prefill", urls, PoolLimits(1, 8)),
        decode=PoolSource("decode", ("http://127.0.0.1:1/metrics",), PoolLimits(1, 8)),
    )
    await fleet.look(2)
    assert fleet.said == [
        "prefill stays at 2: its servers have no figures yet",
        "decode stays: no server serves, as far as its metrics tell",
        "prefill stays at 2: no prompts; 1 are enough if that stays so for 60 s more",
    ]
    assert not fleet.api.requests


async def test_a_scale_that_somebody_else_changed_meanwhile_is_left_alone(make_fleet):
    fleet = make_fleet()
    fleet.api.scales_meanwhile = {"pre": 5}
    await fleet.look(6, prompts=145)
    assert fleet.api.replicas["pre"] == 5
    assert any("prefill stays: the API server answers 409" in line for line in fleet.said), fleet.said


async def test_what_can_not_be_scaled_is_said_and_tried_again(make_fleet):
    fleet = make_fleet()
    fleet.api.forbidden = {"patch"}
    await fleet.look(4, prompts=145)
    assert fleet.api.replicas["pre"] == 1
    assert any("answers 403 to PATCH the scale of deployment 'pre'" in line for line in fleet.said)
    fleet.api.forbidden = set()
    await fleet.look(1, prompts=145)
    assert fleet.api.replicas["pre"] == 2
    await fleet.api.stop()
    await fleet.look(1)
    assert "can't be reached" in fleet.said[-1]


async def test_pages_that_can_not_be_read_change_nothing(make_fleet, pages):
    fleet = make_fleet()
    await fleet.look(1, prompts=145)
    assert "no figures yet" in fleet.said[-1]
    pages.are_shown = False
    await fleet.look(6, prompts=145)
    assert fleet.api.replicas == {"pre": 1, "dec": 1}
    where = fleet.router.url.removeprefix("http://")
    assert f"no router's metrics can be read ({where}: it answers 503)" in fleet.said[-1]


async def test_a_pool_does_not_shrink_while_the_page_of_one_of_its_servers_is_lost(make_fleet, pages):
    fleet = make_fleet()
    urls = (fleet.decode.url, "http://127.0.0.1:1/metrics")
    fleet = make_fleet(decode=PoolSource("decode", urls, PoolLimits(1, 8), "dec"))
    fleet.api.replicas["dec"] = 2
    await fleet.look(10)
    assert fleet.api.replicas == {"pre": 1, "dec": 2}
    (said,) = [line for line in fleet.said if "not the whole load" in line]
    assert said.startswith("decode stays at 2: ")
    assert "127.0.0.1:1/metrics can't be read" in said


async def test_metrics_tell_for_how_long_a_pool_was_not_planned(make_fleet, pages):
    def ages():
        (age,) = [m for m in fleet.planner.figures.collect() if m.name.endswith("_plan_age_seconds")]
        return {sample.labels["role"]: sample.value for sample in age.samples}

    fleet = make_fleet()
    await fleet.look(2)
    assert ages() == {"prefill": 0.0, "decode": 0.0}
    pages.are_shown = False
    await fleet.look(4)
    assert ages() == {"prefill": 4 * LOOK_S, "decode": 4 * LOOK_S}
    pages.are_shown = True
    fleet.api.forbidden = {"get"}
    await fleet.look(2)
    assert ages() == {"prefill": 6 * LOOK_S, "decode": 6 * LOOK_S}, "whose size can't be read"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "http://nobody:8000/metrics"])
async def test_a_router_that_can_not_be_reached_is_named_with_a_remedy_at_once(make_fleet, monkeypatch, url):
    def look_up(host, *place, **fields):
        if host == "nobody":  # no name server is asked
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return sound(host, *place, **fields)

    sound = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    fleet = make_fleet(router_urls=(url,))
    await fleet.look(1)
    assert [line.partition(":")[0] for line in fleet.said] == ["prefill stays at 1", "decode stays at 1"]
    for line in fleet.said:
        assert url.removeprefix("http://").partition("/")[0] in line
        assert "--router-metrics" in line


async def test_limits_are_kept(make_fleet, pages):
    fleet = make_fleet()
    servers = FakeServer(pages)
    fleet = make_fleet(prefill=PoolSource("prefill", (servers.url,), PoolLimits(3, 3), "pre"))
    await fleet.look(8)
    assert fleet.api.replicas == {"pre": 3, "dec": 1}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([], "--router-metrics URL"),
        (["--prefill-metrics", "ftp://a/metrics"], "expected a URL, http://"),
        (["--min-prefill", "4", "--max-prefill", "3"], "--min-prefill 4 is above --max-prefill 3"),
        (["--window", "20"], "--window 20 is too short"),
        (["--apply"], "needs something to scale"),
        (["--prefill-deployment", "pre"], "needs --kubernetes-namespace"),
        (["--kubernetes-namespace", "ns"], "give --kubeconfig FILE"),
    ],
    ids=str,
)
def test_flags_that_do_not_go_together_are_refused(given, match):
    pages = ["--prefill-metrics", "http://a/metrics", "--decode-metrics", "http://a/metrics"]
    if given and given[0] != "--router-metrics":
        pages += ["--router-metrics", "http://a/metrics"]
    with pytest.raises(ConfigError, match=match):
        BY_NAME["autoscale"].prepare(parsed(BY_NAME["autoscale"], *pages, *given))


async def test_the_command_runs_until_it_is_told_to_stop(pages):
    router, server = FakeRouter(pages), FakeServer(pages)
    (port,) = free_ports(1)
    flags = ["--router-metrics", router.url, "--prefill-metrics", server.url, "--decode-metrics", server.url]
    flags += ["--interval", "0.1", "--window", "1", "--metrics-port", str(port)]
    command = [sys.executable, "-m", "twinfang", "autoscale", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"prefill stays at 1: its servers have no figures yet\n"
            assert await process.stdout.readline() == b"decode stays at 1: its servers have no figures yet\n"
            assert b"that is enough for now" in await process.stdout.readline()
            async with httpx.AsyncClient(timeout=60.0) as client:
                text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            assert 'twinfang_autoscale_servers{kind="planned",role="prefill"} 1.0' in text
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
