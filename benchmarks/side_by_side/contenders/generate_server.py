r"""transformers' ``generate`` behind the HTTP API that the benchmark's client uses.

    python -m benchmarks.side_by_side.contenders.generate_server --model DIR --port 8000 \
        --threads 2 --dtype float32

One ``generate`` runs at a time. Its batch is the requests that wait when it begins, plus those of the next
``GATHER_S``. Later requests wait until it has ended. So it has a batch's speed but no continuous batching.
All prompts of a batch are equally long, and so are all answers, because the benchmark asks for nothing else;
no padding is needed. End-of-sequence tokens do not end an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

DTYPES = ("float32", "bfloat16")
GATHER_S = 0.02
MAX_BATCH = 32


@dataclass(frozen=True)
class Job:
    """One request that waits for its answer."""

    prompt: list[int]
    max_tokens: int
    tell: Callable[[int | None], None]
    """Gets each token of the answer, then None. The generating thread calls it."""

    @property
    def size(self) -> tuple[int, int]:
        return len(self.prompt), self.max_tokens


class Batch(BaseStreamer):
    """Passes the tokens of a step to their requests."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._has_seen_prompts = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_seen_prompts:
            for job, token in zip(self._jobs, value.flatten().tolist(), strict=True):
                job.tell(token)
        self._has_seen_prompts = True

    def end(self) -> None:
        for job in self._jobs:
            job.tell(None)


def gather(jobs: queue.SimpleQueue[Job], first: Job) -> tuple[list[Job], Job | None]:
    """Returns ``first`` and the requests of its size that come soon after it, and the first request of
    another size."""
    batch, deadline = [first], time.monotonic() + GATHER_S
    while len(batch) < MAX_BATCH:
        try:
            job = jobs.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if job.size != first.size:
            return batch, job
        batch.append(job)
    return batch, None


def generate_for_ever(model: Any, jobs: queue.SimpleQueue[Job]) -> None:
    """Runs the model in the only thread that does. An error ends the whole process, not only the thread."""
    try:
        _generate_for_ever(model, jobs)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@torch.inference_mode()
def _generate_for_ever(model: Any, jobs: queue.SimpleQueue[Job]) -> None:
    left: Job | None = None
    while True:
        batch, left = gather(jobs, left or jobs.get())
        prompts = torch.tensor([job.prompt for job in batch])
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=batch[0].max_tokens,
            do_sample=False,
            eos_token_id=None,
            streamer=Batch(batch),
        )


def app(model_dir: Path, dtype: torch.dtype) -> FastAPI:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    model.eval()  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=generate_for_ever, args=(model, jobs), daemon=True).start()
    api = FastAPI()

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model_dir.name, "object": "model"}]}

    @api.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> StreamingResponse:
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue[int | None]()

        def tell(token: int | None) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, token)

        async def events() -> AsyncIterator[str]:
            num_tokens = 0
            while (token := await tokens.get()) is not None:
                num_tokens += 1
                text = tokenizer.decode([token])
                yield event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            yield event({"choices": [], "usage": {"completion_tokens": num_tokens}})
            yield "data: [DONE]\n\n"

        jobs.put(Job(body["prompt"], body["max_tokens"], tell))
        return StreamingResponse(events(), media_type="text/event-stream")

    return api


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    uvicorn.run(
        app(options.model, getattr(torch, options.dtype)),
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
