"""The cost of a handoff until the first token: TTFT of `up` minus that of `serve`, and its parts.

    python -m benchmarks.handoff.ttft --json benchmarks/results/ttft.json --plot docs/ttft.png

Both stacks run at the same time, each in its own processes. They answer the same prompts over HTTP in turns,
one at a time; the stack that begins changes with every pair. A part is what a request adds to the sums of the
routers' histograms, so it belongs to that request alone. The results are medians of the pairs' differences,
over the half of the pairs in which the stacks' processes waited least for a core (the kernel counts that),
because other programs often use the machine too. The handoff is the sum of all parts except computing the
prompt, which is the same work in both arrangements: on a busy machine, the noise of seconds of computing
hides milliseconds.

| part | is |
|---|---|
| queue | waits on the prefill and the decode server for their engines, minus the one of `serve` |
| RPC | messages and event loops between router and servers, both ways, minus those of `serve` |
| prompt | computing N - 1 tokens on the prefill server, minus N tokens and a sample on the other's |
| transfer | reading blocks and state |
| recompute | the decode server's step over token N |
| rest | what is left of TTFT: the router's own work, text, HTTP, the client |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.event_stream import EventStream
from benchmarks.serving.load import Workload, timed_request
from twinfang.bench.machine import machine, waited_s
from twinfang.flags.table import BUNDLED_MODEL
from twinfang.launch import LaunchedStack, launch

PROMPT_LENS = (16, 64, 256, 1024, 2048, 4096, 8192)
PAIRS = 41
MIN_PAIRS = 7
ANSWER_TOKENS = 4
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 900
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0

SUMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "disaggregated": {
        "queue": ("prefill_queue", "decode_queue"),
        "rpc": ("prefill_rpc", "decode_rpc"),
        "prompt": ("prefill",),
        "transfer": ("transfer",),
        "recompute": ("decode_first_token",),
    },
    "monolithic": {
        "queue": ("decode_queue",),
        "rpc": ("decode_rpc",),
        "prompt": ("decode_first_token",),
        "transfer": (),
        "recompute": (),
    },
}
"""The histograms whose seconds make up a part, in each arrangement."""
PARTS = ("queue", "rpc", "prompt", "transfer", "recompute")
ALL = (*PARTS, "rest")
HANDOFF = tuple(part for part in ALL if part != "prompt")

Times = dict[str, float]
"""``ttft``, each part, and ``waited`` for cores, of one request, in milliseconds."""


@contextmanager
def model_of(options: argparse.Namespace) -> Iterator[Path]:
    """Yields the model's directory, in a copy whose limit admits the longest prompt.

    NemotronH has no positional encoding, so the limit is only a number.
    """
    needed = max(options.prompt_lens) + ANSWER_TOKENS
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    if config["max_position_embeddings"] >= needed:
        yield options.model
        return
    with tempfile.TemporaryDirectory(prefix="twinfang-model-") as folder:
        copy = Path(folder) / options.model.name
        copy.mkdir()
        for file in options.model.iterdir():
            if file.name != "config.json":
                (copy / file.name).symlink_to(file.resolve())
        config["max_position_embeddings"] = needed
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield copy


@contextmanager
def running(command: str, model: Path, threads: int) -> Iterator[LaunchedStack]:
    with tempfile.TemporaryDirectory(prefix="twinfang-") as folder:
        flags = ("--model", str(model), "--threads", str(threads), "--log-level", "warning")
        stack = launch(Path(folder), command, *flags, environment={"TWINFANG_SANITIZE": "0"})
        try:
            stack.wait_until_ready(timeout_s=START_TIMEOUT_S)
            yield stack
        finally:
            if stack.supervisor.poll() is None:
                stack.stop(timeout_s=STOP_TIMEOUT_S)


class Arrangement:
    """A running stack, and what each request adds to its router's sums."""

    def __init__(self, name: str, stack: LaunchedStack, client: httpx.AsyncClient) -> None:
        self._sums = SUMS[name]
        self._model = stack.model
        self._client = client
        self._pids = [process.pid for process in stack.processes().values()]

    async def times(self, workload: Workload, index: int) -> Times:
        before, waited_before_s = await self._parts(), waited_s(self._pids)
        stream = await EventStream.connect(str(self._client.base_url))
        timing = await timed_request(stream, self._model, workload, index)
        stream.close()
        waited = waited_s(self._pids) - waited_before_s
        after = await self._parts()
        parts = {part: (after[part] - before[part]) * 1e3 for part in PARTS}
        ttft = timing.ttft_s * 1e3
        return {"ttft": ttft, **parts, "rest": ttft - sum(parts.values()), "waited": waited * 1e3}

    async def _parts(self) -> Times:
        """Returns the seconds of all requests so far, by part."""
        text = (await self._client.get("/metrics")).text
        sums = {
            sample.name: float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.endswith("_seconds_sum")
        }
        return {
            part: sum(sums[f"twinfang_{name}_seconds_sum"] for name in names)
            for part, names in self._sums.items()
        }


async def measure_length(
    arrangements: Mapping[str, Arrangement], prompt_len: int, pairs: int
) -> list[dict[str, Times]]:
    """Measures ``num_pairs`` pairs of answers to the same prompt. Two more pairs before them warm up and are
    left out."""
    workload = Workload(prompt_len, ANSWER_TOKENS, FIRST_TOKEN_ID, LAST_TOKEN_ID)
    found: list[dict[str, Times]] = []
    for index in range(pairs + 2):
        names = list(arrangements) if index % 2 else list(reversed(arrangements))
        found.append({name: await arrangements[name].times(workload, index) for name in names})
    return found[2:]


def summary(prompt_len: int, pairs: list[dict[str, Times]]) -> dict[str, Any]:
    """Returns medians over the quieter half of the pairs, in ms. ``handoff`` is the sum of all parts except
    ``prompt``."""

    def waited(pair: dict[str, Times]) -> float:
        return max(times["waited"] for times in pair.values())

    quiet = sorted(pairs, key=waited)[: -(-len(pairs) // 2)]
    differences = {
        part: sorted(pair["disaggregated"][part] - pair["monolithic"][part] for pair in quiet)
        for part in ("ttft", *ALL)
    }
    medians = {part: round(statistics.median(values), 3) for part, values in differences.items()}
    return {
        "prompt_tokens": prompt_len,
        "pairs": len(quiet),
        "extra_ms": {"handoff": round(sum(medians[part] for part in HANDOFF), 3), **medians},
        "quartiles_ms": {
            part: [round(values[len(values) // 4], 3), round(values[-1 - len(values) // 4], 3)]
            for part, values in differences.items()
        },
        "least_ttft_ms": {name: round(min(pair[name]["ttft"] for pair in pairs), 3) for name in SUMS},
        "medians_ms": {
            name: {
                key: round(statistics.median(pair[name][key] for pair in quiet), 3) for key in quiet[0][name]
            }
            for name in SUMS
        },
    }


HEADER = f"{'prompt':>7} {'serve':>9} {'up':>9} {'extra':>7} {'handoff':>8}" + "".join(
    f"{p:>10}" for p in ALL
)


def row(result: dict[str, Any]) -> str:
    medians, extra = result["medians_ms"], result["extra_ms"]
    ttfts = f"{medians['monolithic']['ttft']:>9.2f} {medians['disaggregated']['ttft']:>9.2f}"
    cells = "".join(f"{extra[part]:>10.2f}" for part in ALL)
    return f"{result['prompt_tokens']:>7} {ttfts} {extra['ttft']:>7.2f} {extra['handoff']:>8.2f}{cells}"


async def measure(
    stacks: Mapping[str, LaunchedStack],
    prompt_lens: tuple[int, ...],
    pairs: int,
    on_results: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Prints a summary for each length when it is done. ``on_results`` gets all results so far."""
    print(HEADER)
    results = []
    async with AsyncExitStack() as exits:
        arrangements = {}
        for name, stack in stacks.items():
            client = await exits.enter_async_context(httpx.AsyncClient(base_url=stack.url, timeout=600.0))
            arrangements[name] = Arrangement(name, stack, client)
        for prompt_len in prompt_lens:
            num_pairs = max(MIN_PAIRS, pairs * min(1024, prompt_len) // prompt_len)
            results.append(summary(prompt_len, await measure_length(arrangements, prompt_len, num_pairs)))
            print(row(results[-1]), flush=True)
            on_results(results)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Plots the handoff's stacked parts on the left, a bar for each prompt length, and both arrangements'
    TTFT on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    labels = [f"{result['prompt_tokens']:,}" for result in results]
    tops, bottoms = [0.0] * len(results), [0.0] * len(results)
    for part in HANDOFF:
        heights = [result["extra_ms"][part] for result in results]
        starts = [top if h >= 0 else low for h, top, low in zip(heights, tops, bottoms, strict=True)]
        left.bar(labels, heights, bottom=starts, label=part, width=0.6)
        tops = [top + max(h, 0.0) for top, h in zip(tops, heights, strict=True)]
        bottoms = [low + min(h, 0.0) for low, h in zip(bottoms, heights, strict=True)]
    left.axhline(0, color="black", linewidth=0.8)
    left.set(xlabel="prompt, tokens", ylabel="ms", title="what the handoff adds to TTFT (medians)")
    for name, marker in (("monolithic", "o"), ("disaggregated", "s")):
        ttfts = [result["medians_ms"][name]["ttft"] for result in results]
        right.plot([result["prompt_tokens"] for result in results], ttfts, marker=marker, label=name)
    right.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="ms", title="TTFT (medians)")
    for axis in (left, right):
        axis.grid(axis="y", alpha=0.3)
    left.set_ylim(top=left.get_ylim()[1] * 1.2)  # room for the legend
    left.legend(ncols=3, loc="upper left")
    right.legend()
    figure.savefig(path, dpi=110)


def lengths(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="default: the bundled one")
    parser.add_argument("--prompt-lens", type=lengths, default=PROMPT_LENS, metavar="N,…")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help="a length, fewer beyond 1,024 tokens; default: 41"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each server; default: 1")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--plot", type=Path, help="draw them there")
    return parser.parse_args()


def write(
    options: argparse.Namespace, machine_before: dict[str, object], results: list[dict[str, Any]]
) -> None:
    if options.json:
        report = {
            "model": options.model.name,
            "threads_per_server": options.threads,
            "machine": machine_before,
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(results, options.plot)


def main() -> None:
    options = parse()
    before = machine()
    with ExitStack() as exits:
        model = exits.enter_context(model_of(options))
        stacks = {
            name: exits.enter_context(running(command, model, options.threads))
            for name, command in (("disaggregated", "up"), ("monolithic", "serve"))
        }
        asyncio.run(
            measure(stacks, options.prompt_lens, options.pairs, lambda found: write(options, before, found))
        )


if __name__ == "__main__":
    main()
