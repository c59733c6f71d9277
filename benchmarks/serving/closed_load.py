"""Serving benchmark: TTFT, TPOT, inter-token latency and output tokens/s at several concurrencies.

    python -m benchmarks.serving.closed_load --start "up --decode 2"
    python -m benchmarks.serving.closed_load --base-url http://127.0.0.1:8000 --concurrency 1,8 \\
        --json result.json

It uses OpenAI's HTTP API and can measure any server that takes token id prompts and `ignore_eos`, such as
vLLM and SGLang. Before each measurement it sends as many requests as will be in flight, to warm up.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.serving.load import LoadError, Run, Workload, run_load
from twinfang.bench.machine import machine
from twinfang.launch import launch
from wire.errors import TwinfangError

PERCENTILES = (50, 90, 99)
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0


def percentile(values: list[float], percent: int) -> float:
    """Returns the smallest value that ``percent`` % of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def milliseconds(values: list[float]) -> dict[str, float]:
    """Returns percentiles of times in seconds, in milliseconds."""
    return {f"p{percent}": round(percentile(values, percent) * 1000, 3) for percent in PERCENTILES}


def summary(run: Run) -> dict[str, object]:
    gaps = [gap for timing in run.timings for gap in timing.inter_event_s]
    return {
        "concurrency": run.concurrency,
        "requests": len(run.timings),
        "duration_s": round(run.duration_s, 3),
        "output_tokens_per_s": round(run.output_tokens_per_s, 1),
        "ttft_ms": milliseconds([timing.ttft_s for timing in run.timings]),
        "tpot_ms": milliseconds([timing.tpot_s for timing in run.timings]),
        "inter_token_ms": milliseconds(gaps or [0.0]),
    }


HEADER = (
    f"{'in flight':>9} {'requests':>8} {'out tok/s':>9}   "
    f"{'TTFT p50/p90/p99':^21}   {'TPOT p50/p90/p99':^21}   {'inter-token p50/p90/p99':^23}  ms"
)


def row(result: dict[str, object]) -> str:
    def cells(name: str, width: int) -> str:
        times: dict[str, float] = result[name]  # type: ignore[assignment]
        return "/".join(f"{value:.1f}" for value in times.values()).center(width)

    return (
        f"{result['concurrency']:>9} {result['requests']:>8} {result['output_tokens_per_s']:>9}   "
        f"{cells('ttft_ms', 21)}   {cells('tpot_ms', 21)}   {cells('inter_token_ms', 23)}"
    )


async def measure(
    url: str, model: str, workload: Workload, options: argparse.Namespace
) -> list[dict[str, object]]:
    """Returns one row for each concurrency, and prints each when it is done."""
    results = []
    print(HEADER, flush=True)
    for concurrency in options.concurrency:
        num_requests = options.requests or max(8, 4 * concurrency)
        prompts, warm_up = (
            dataclasses.replace(workload, seed=2 * (1000 * workload.seed + concurrency) + part)
            for part in (0, 1)  # no two concurrencies share prompts: the second would find them cached
        )
        await run_load(url, model, warm_up, concurrency=concurrency, num_requests=concurrency)
        run = await run_load(url, model, prompts, concurrency=concurrency, num_requests=num_requests)
        results.append(summary(run))
        print(row(results[-1]), flush=True)
    return results


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """Yields the URL to measure: the given one, or that of a stack that runs during the block."""
    if options.base_url is not None:
        yield options.base_url
        return
    with tempfile.TemporaryDirectory(prefix="twinfang-bench-") as folder:
        stack = launch(Path(folder), *shlex.split(options.start), "--log-level", "warning")
        try:
            stack.wait_until_ready(START_TIMEOUT_S)
            yield stack.url
        finally:
            if stack.supervisor.poll() is None:
                stack.stop(STOP_TIMEOUT_S)


def served_model(url: str) -> str:
    """Returns the first model that the server lists."""
    response = httpx.get(f"{url}/v1/models", timeout=30.0)
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


def concurrencies(text: str) -> list[int]:
    values = [int(item) for item in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def token_id_range(text: str) -> tuple[int, int]:
    first, last = (int(item) for item in text.split("-"))
    if not 0 <= first <= last:
        raise ValueError(text)
    return first, last


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.closed_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--base-url", metavar="URL", help="a server that runs")
    target.add_argument("--start", metavar="COMMAND", help='start "up …" or "serve …" for the benchmark')
    parser.add_argument("--model", metavar="M", help="default: the first that the server names")
    parser.add_argument(
        "--concurrency", type=concurrencies, default=[1, 8, 32], metavar="N,…", help="default: 1,8,32"
    )
    parser.add_argument("--input-len", type=int, default=256, metavar="TOKENS", help="default: 256")
    parser.add_argument("--output-len", type=int, default=128, metavar="TOKENS", help="default: 128")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="a concurrency; default: 4 times it, at least 8"
    )
    parser.add_argument(
        "--token-ids",
        type=token_id_range,
        default=(5, 400),
        metavar="A-B",
        help="prompts are random ids from A to B, all of which the model must know; default: 5-400",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results with machine and versions")
    return parser


def main() -> int:
    options = parser().parse_args()
    first_id, last_id = options.token_ids
    workload = Workload(options.input_len, options.output_len, first_id, last_id, options.seed)
    before = machine()
    print(f"{before['processor']}, {before['cores']} cores, load {before['load_average']:.1f}")
    print(f"{options.start or options.base_url}: {options.input_len} tokens in, {options.output_len} out")
    try:
        with server(options) as url:
            model = options.model or served_model(url)
            results = asyncio.run(measure(url, model, workload, options))
    except (LoadError, TwinfangError, httpx.HTTPError) as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    except ExceptionGroup as group:
        print(f"benchmark failed: {group.exceptions[0]}", file=sys.stderr)
        return 1
    if options.json is not None:
        report = {
            "server": options.start or options.base_url,
            "model": model,
            "input_len": options.input_len,
            "output_len": options.output_len,
            "machine": before,
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
