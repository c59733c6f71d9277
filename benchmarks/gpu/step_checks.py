"""Checks whole engine steps on a GPU: do graphs compute what single launches compute, and does anything wait?

    python -m benchmarks.gpu.step_checks [--models 8b-slice nano-slice] [--json FILE]
    python -m benchmarks.gpu.step_checks --speculative-state replay

Each engine answers the same requests, which join and leave all the time, three times for every kind of
sampling:

1. with graphs, and the host watched for waits (:mod:`benchmarks.gpu.waits`),
2. with every graph's step launched one kernel at a time, with the arguments that the graph was captured with:
   the tokens must be equal,
3. as an engine without graphs would run: decode attention may be split otherwise, so that equally good tokens
   may change places in bfloat16. These are counted.

A few requests are answered once more, alone, and differences are counted: matrix products of another batch
may round otherwise in bfloat16.

It fails if tokens of 1 and 2 differ, if a request fails, if the host waits in 1, or if a decode step has no
graph.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.waits import watched
from benchmarks.json_file import write_json
from benchmarks.steps.model_shape import TITLES, write_configuration
from engine.config import EngineConfig
from engine.cost.speculative_state import SpeculativeState
from engine.engine import Engine
from engine.sampling.sampling_table import SamplingNeeds
from engine.step.graph import CAPTURED
from testing.engines.speculating import Answer, Ask, greedy_asks, serve
from wire.messages.sampling_params import SamplingParams

MODELS = ("8b-slice", "nano-slice")
DRAFTS = (0, 3)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.2},
}
ROWS = 16
MAX_MODEL_LEN = 2048
CACHE_BYTES = 4 << 30
CPU_CACHE_BYTES = 256 << 20
CANCELLED_AFTER = {3: 5, 11: 9}
"""Requests that are cancelled, and after how many tokens."""
NUM_ALONE = 8
"""Requests that are answered once more, alone."""
SHOWN_DIFFERENCES = 4
MAX_FAULT_CHARS = 600


@dataclass(frozen=True)
class Check:
    """One kind of sampling in one engine."""

    model: str
    num_drafts: int
    kind: str
    steps: int
    """Decode steps of the first run, without those that also computed prompts."""
    graph_steps: int
    """Those of them that were one replay of a graph."""
    waits: dict[str, int]
    """Calls by which the host waited for the GPU, by place."""
    different: list[str]
    """The first answers that differ between graphs and single launches."""
    num_different: int
    num_different_without_graphs: int
    """Answers that differ from an engine's without graphs; not a fault."""
    num_different_alone: int
    """Of :data:`NUM_ALONE` answers, those that differ when the request runs alone; not a fault."""
    failed: list[str]
    """Requests that ended with an error."""
    seconds: float

    def faults(self) -> Iterator[str]:
        where = f"{self.model}, k = {self.num_drafts}, {self.kind}"
        if self.num_different:
            yield f"{where}: {self.num_different} answers of graphs differ from single launches"
        if self.failed:
            yield f"{where}: {len(self.failed)} requests failed"
        if self.waits:
            yield f"{where}: the host waited at {', '.join(self.waits)}"
        if self.graph_steps < self.steps:
            yield f"{where}: {self.steps - self.graph_steps} of {self.steps} decode steps had no graph"


def make_engine(
    directory: Path, num_drafts: int, device: str, speculative_state: SpeculativeState = "auto"
) -> Engine:
    return Engine(
        EngineConfig(
            directory,
            "both",
            load_format="dummy",
            device=device,
            max_num_seqs=ROWS,
            max_batch_tokens=256,
            cache_mode="none",
            cache_memory_bytes=CACHE_BYTES if device == "cuda" else CPU_CACHE_BYTES,
            num_speculative=num_drafts,
            drafter="ngram" if num_drafts else None,
            speculative_state=speculative_state if num_drafts else "auto",
        )
    )


def asks_of(kind: str, num_requests: int) -> list[Ask]:
    """Returns requests of 1 to 100 tokens, with answers of different lengths and some with stop tokens."""
    return [
        replace(
            ask,
            params=SamplingParams(max_tokens=ask.params.max_tokens, **KINDS[kind]),
            seed=i,
            stop=frozenset(range(0, 4000, 40)) if i % 5 == 4 else frozenset(),
        )
        for i, ask in enumerate(greedy_asks(num_requests, seed=4, num_tokens=40))
    ]


@contextmanager
def replaying(engine: Engine, replay: Callable[[int, SamplingNeeds], Any]) -> Iterator[None]:
    """Inside the block, the engine's runner calls ``replay`` for a graph."""
    graphs: Any = engine._runner._graphs
    before = graphs.replay
    graphs.replay = replay
    try:
        yield
    finally:
        graphs.replay = before


def launch_singly(engine: Engine) -> Callable[[int, SamplingNeeds], Any]:
    """Returns a function that launches a captured step's kernels one at a time."""
    graphs: Any = engine._runner._graphs

    def launch(num_rows: int, needs: SamplingNeeds) -> Any:
        if not graphs._captured:
            return None
        kind = next(kind for kind in CAPTURED if kind | needs == kind)
        step = graphs._builder.decode_step(num_rows, kind, max_seq_len=graphs._max_seq_len, samples=True)
        step = replace(step, logits=graphs._logits[:num_rows])
        return step, graphs._program.run(step)

    return launch


def check(engine: Engine, model: str, kind: str, num_requests: int) -> Check:
    began = time.monotonic()
    asks = asks_of(kind, num_requests)
    serve(engine, asks[:ROWS])  # what is allocated at first use is allocated
    before = dict(engine.measures.steps)
    with watched(engine.device) as waits:
        with_graphs = _answers(engine, asks)
    steps = {key: count - before[key] for key, count in engine.measures.steps.items()}
    with replaying(engine, launch_singly(engine)):
        singly = _answers(engine, asks)
    with replaying(engine, lambda *_: None):
        without_graphs = _answers(engine, asks)
    alone = serve(engine, asks[:NUM_ALONE], 1)
    different = list(_differences(with_graphs, singly))
    return Check(
        model,
        engine.config.num_speculative,
        kind,
        steps=steps["decode", "graph"] + steps["decode", "eager"],
        graph_steps=steps["decode", "graph"],
        waits=dict(waits),
        different=different[:SHOWN_DIFFERENCES],
        num_different=len(different),
        num_different_without_graphs=len(list(_differences(with_graphs, without_graphs))),
        num_different_alone=len(list(_differences(with_graphs[: len(alone)], alone))),
        failed=[str(i) for i, answer in enumerate(with_graphs) if answer.finish_reason == "error"],
        seconds=round(time.monotonic() - began, 2),
    )


def _answers(engine: Engine, asks: Sequence[Ask]) -> list[Answer]:
    """Returns the answers; one request joins before a step, while others decode and leave."""
    return serve(engine, asks, ROWS, per_step=1, cancels=CANCELLED_AFTER)


def _differences(answers: Sequence[Answer], expected: Sequence[Answer]) -> Iterator[str]:
    """Yields the requests whose answers differ. A cancelled request's last tokens depend on when the host
    asked, so only what both have is compared."""
    for i, (ours, theirs) in enumerate(zip(answers, expected, strict=True)):
        length = min(len(ours.tokens), len(theirs.tokens)) if ours.cancelled else None
        if ours.tokens[:length] != theirs.tokens[:length]:
            pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
            at = next((index for index, (a, b) in pairs if a != b), "the end")
            yield f"request {i} at token {at}: {ours.tokens[-8:]}, expected {theirs.tokens[-8:]}"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", nargs="+", choices=list(TITLES), default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--requests", type=int, default=64, help="of each kind")
    parser.add_argument("--speculative-state", choices=["auto", "slots", "replay"], default="auto")
    parser.add_argument("--json", type=Path, help="figures, written anew after each check")
    return parser


def check_all(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the figures so far after each check. An engine that fails does not prevent the next one."""
    figures: dict[str, Any] = {"start_up": [], "checks": [], "faults": []}
    for model, num_drafts in itertools.product(options.models, DRAFTS):
        try:
            directory = write_configuration(model, folder, max_model_len=MAX_MODEL_LEN)
            engine = make_engine(directory, num_drafts, options.device, options.speculative_state)
            start = {"model": model, "num_drafts": num_drafts, **engine.start_up.figures(), **_memory()}
            start["replays"] = engine.capacity.replays
            figures["start_up"].append(start)
            for kind in options.kinds:
                found = check(engine, model, kind, options.requests)
                figures["checks"].append(asdict(found))
                figures["faults"] += found.faults()
                print(figures["checks"][-1], flush=True)
                yield figures
        except Exception as error:
            traceback.print_exc()
            fault = f"{model}, k = {num_drafts}: {type(error).__name__}: {error}"
            figures["faults"].append(fault[:MAX_FAULT_CHARS])
            yield figures
        engine = None
        gc.collect()  # its memory is the next one's


def main() -> None:
    options = parser().parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="twinfang-step-checks-") as folder:
        for figures in check_all(options, Path(folder)):
            if options.json is not None:
                write_json(options.json, figures)
    if figures["faults"]:
        raise SystemExit("\n".join(figures["faults"]))


def _memory() -> dict[str, int]:
    """Returns what torch holds of the GPU: weights, pools and graphs."""
    return {"reserved_bytes": torch.cuda.memory_reserved()} if torch.cuda.is_available() else {}


if __name__ == "__main__":
    main()
