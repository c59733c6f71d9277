"""Several models and aliases behind one router, each with its tokenizer, template, defaults and servers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest

from router.config import ModelAlias, ModelSource, RouterConfig
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import running_router
from testing.router.scripted_servers import ScriptedDecode, ScriptedPrefill, saying, server_info
from testing.router.tokenizers import byte_fallback, write_model_dir
from wire.errors import ConfigError

NAMES = ("small", "large")
TEMPLATE_OF_LARGE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass
class Fleet:
    """A pair of servers a model, and one that serves what nobody asked for."""

    client: httpx.AsyncClient
    services: object
    prefill: dict[str, ScriptedPrefill]
    decode: dict[str, ScriptedDecode]

    async def post(self, path: str, **body):
        return await self.client.post(path, json=body)


@pytest.fixture
async def fleet(tmp_path):
    folders = {
        "small": write_model_dir(tmp_path / "small"),
        "large": write_model_dir(
            tmp_path / "large",
            settings={"chat_template": TEMPLATE_OF_LARGE},
            generation={"temperature": 0.25},
        ),
    }
    byte_fallback()._backend.save(str(folders["large"] / "tokenizer.json"))
    async with AsyncExitStack() as exits:
        prefill, decode = {}, {}
        for i, name in enumerate((*NAMES, "stray")):
            # One fingerprint for all: nothing but the name keeps them apart.
            limits = {"served_model_name": name, "max_model_len": 64 + i}
            prefill[name] = ScriptedPrefill(server_info("prefill", **limits))
            decode[name] = ScriptedDecode(server_info("decode", **limits), script=saying([100 + i] * 4))
            for server in (prefill[name], decode[name]):
                exits.push_async_callback(server.stop)
                await server.start()
        config = RouterConfig(
            models=tuple(ModelSource(name, folder) for name, folder in folders.items()),
            aliases=(ModelAlias("gpt-4o", "large"),),
            prefill_addresses=tuple(server.address for server in prefill.values()),
            decode_addresses=tuple(server.address for server in decode.values()),
            probe_interval_s=0.1,
            hold_s=0.0,
            conversation_return=True,
        )
        url, app = await exits.enter_async_context(running_router(config))
        client = await exits.enter_async_context(httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S))
        services = app.state.services
        await until(lambda: services.pool.num_connected() == {"prefill": 2, "decode": 2})
        yield Fleet(client, services, prefill, decode)


async def test_all_models_and_aliases_are_listed_each_with_its_own_limit(fleet):
    cards = (await fleet.client.get("/v1/models")).json()["data"]
    listed = [(card["id"], card["root"], card["max_model_len"]) for card in cards]
    assert listed == [("small", "small", 64), ("large", "large", 65), ("gpt-4o", "large", 65)]
    assert (await fleet.client.get("/v1/models/gpt-4o")).json() == cards[2]


async def test_a_request_is_served_by_the_servers_of_its_model(fleet):
    for asked, served, token_id in (
        ("small", "small", 100),
        ("large", "large", 101),
        ("gpt-4o", "large", 101),
    ):
        for _ in range(4):
            fields = {"prompt": [3, 4, 5], "max_tokens": 2, "return_token_ids": True}
            response = await fleet.post("/v1/completions", model=asked, **fields)
            assert response.status_code == 200, response.text
            assert response.json()["model"] == served
            assert response.json()["choices"][0]["token_ids"] == [token_id] * 2
    assert [len(fleet.prefill[name].requests) for name in NAMES] == [4, 8]
    assert [len(fleet.decode[name].submitted) for name in NAMES] == [4, 8]
    assert not fleet.prefill["stray"].requests
    assert not fleet.decode["stray"].submitted


async def test_each_model_has_its_own_tokenizer_template_and_defaults(fleet):
    prompts = {}
    for name in NAMES:
        await fleet.post("/v1/completions", model=name, prompt="hello", max_tokens=1)
        chat = [{"role": "user", "content": "hello"}]
        response = await fleet.post("/v1/chat/completions", model=name, messages=chat, max_tokens=1)
        assert response.status_code == 200, response.text
        tokens = (await fleet.post("/tokenize", model=name, prompt="hello")).json()
        completion, chat_completion = fleet.decode[name].submitted
        assert list(completion.token_ids) == tokens["tokens"]
        text = (await fleet.post("/detokenize", model=name, tokens=tokens["tokens"])).json()
        assert text["prompt"] == "hello"
        prompts[name] = (completion.token_ids, chat_completion.token_ids)
        assert completion.params.temperature == {"small": 1.0, "large": 0.25}[name]
    assert prompts["small"][0] != prompts["large"][0]
    assert prompts["large"][1] == prompts["large"][0]  # its template adds nothing
    assert len(prompts["small"][1]) > len(prompts["small"][0])


async def test_a_name_that_is_no_model_s_is_openai_s_404(fleet):
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    asked = [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", chat),
        ("/tokenize", {"prompt": "a"}),
    ]
    for path, body in asked:
        response = await fleet.post(path, model="stray", **body)
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'stray' does not exist; this server has 'small', 'large', 'gpt-4o'" in error["message"]
    assert (await fleet.client.get("/v1/models/stray")).status_code == 404


async def test_a_request_has_to_name_one_of_several_models(fleet):
    response = await fleet.post("/v1/completions", prompt="a")
    assert response.status_code == 400
    assert "model is missing: it must be one of 'small'" in response.text


async def test_a_model_without_servers_is_unavailable_and_the_others_are_not(fleet):
    await fleet.decode["small"].stop()
    await until(lambda: fleet.services.pool.num_connected()["decode"] == 1)
    response = await fleet.post("/v1/completions", model="small", prompt="a")
    assert response.status_code == 503
    assert "no decode server is ready for model 'small'" in response.text
    assert (await fleet.post("/v1/completions", model="large", prompt="a")).status_code == 200
    assert (await fleet.client.get("/readyz")).status_code == 200
    assert len((await fleet.client.get("/v1/models")).json()["data"]) == 3


async def test_a_server_of_another_model_is_not_used_and_the_reason_is_told(fleet):
    for server in (fleet.decode["small"], fleet.decode["large"]):
        await server.stop()
    await until(lambda: fleet.services.pool.num_connected()["decode"] == 0)
    assert (await fleet.client.get("/readyz")).status_code == 503
    reason = fleet.services.absence.detail
    assert (
        f"{fleet.decode['stray'].address}: it serves 'stray', and this router serves 'large', 'small'"
        in reason
    )
    assert fleet.prefill["stray"].address not in fleet.decode["large"].peers


async def test_what_is_kept_of_one_model_s_conversations_is_not_offered_to_another(fleet):
    small, large = (fleet.services.pool.models[name].conversations for name in NAMES)
    assert small is not None
    assert small is not large


@pytest.mark.parametrize(
    ("models", "aliases", "part"),
    [
        ((), (), "at least one model"),
        (("a", "a"), (), "'a' names two"),
        (("a",), ("b=c",), "alias 'b' is for 'c', .* its models are 'a'"),
        (("a", "b"), ("b=a",), "'b' names two"),
        (("",), (), "empty"),
    ],
)
def test_names_that_can_not_work_are_refused(tmp_path, models, aliases, part):
    with pytest.raises(ConfigError, match=part):
        RouterConfig(
            models=tuple(ModelSource(name, tmp_path) for name in models),
            aliases=tuple(ModelAlias(*alias.split("=")) for alias in aliases),
            decode_addresses=("localhost:1",),
        )
