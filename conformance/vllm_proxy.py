r"""A proxy in front of vLLM's prefill and decode server, as vLLM documents one for its NixlConnector.

    python -m conformance.vllm_proxy --port 8000 --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2

It sends a request to the prefill server with ``max_tokens`` 1 and ``kv_transfer_params`` that ask for a later
remote decode. Then it sends the request to the decode server, with the ``kv_transfer_params`` of that answer.
It tries nothing twice, and gives an error of either server to the client as it is. If a client goes away, its
request on the server ends too. ``GET /requests`` says how many requests are at each server.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

ASK_FOR_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CLIENT_GONE = 499


def app(prefill: str, decode: str) -> FastAPI:
    under_way: Counter[str] = Counter()

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
            api.state.client = client
            yield

    api = FastAPI(lifespan=lifespan)

    async def ask(role: str, url: str, path: str, body: dict[str, Any]) -> httpx.Response:
        under_way[role] += 1
        try:
            client: httpx.AsyncClient = api.state.client
            return await client.post(f"{url}{path}", json=body)
        finally:
            under_way[role] -= 1

    async def disaggregated(path: str, body: dict[str, Any]) -> Response:
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_REMOTE_DECODE}
        prefilled = await ask("prefill", prefill, path, first)
        if prefilled.status_code != 200:
            return passed_on(prefilled)
        params = prefilled.json().get("kv_transfer_params") or {}
        return passed_on(await ask("decode", decode, path, body | {"kv_transfer_params": params}))

    async def answered(path: str, request: Request) -> Response:
        try:
            return await unless_gone(request, disaggregated(path, await request.json()))
        except httpx.HTTPError as error:
            return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 502)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answered("/v1/completions", request)

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answered("/v1/chat/completions", request)

    @api.get("/v1/models")
    async def models() -> Response:
        client: httpx.AsyncClient = api.state.client
        return passed_on(await client.get(f"{decode}/v1/models"))

    @api.get("/requests")
    async def requests() -> dict[str, int]:
        return {"prefill": under_way["prefill"], "decode": under_way["decode"]}

    return api


def passed_on(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Returns the work's answer, or ends the work when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=CLIENT_GONE)
    finally:
        for one in (task, gone):
            one.cancel()


async def until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    options = parser.parse_args()
    uvicorn.run(
        app(options.prefill, options.decode), host="127.0.0.1", port=options.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
