"""The options of a run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testing.checkpoints.random_model import MODELS

INPUT_LEN, OUTPUT_LEN, ROUNDS, CORES = 256, 128, 3, 2
ARRANGEMENTS = ("up", "serve", "vllm", "vllm-pair", "transformers")


def several(known: Sequence[str], text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
    return names


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--vllm", type=Path, metavar="VENV", help="environment with vLLM and its router; default: the PATH's"
    )
    parser.add_argument(
        "--models",
        type=lambda text: several(list(MODELS), text),
        default=list(MODELS),
        metavar="NAME,…",
        help=f"default: {','.join(MODELS)}",
    )
    parser.add_argument(
        "--only",
        type=lambda text: several(ARRANGEMENTS, text),
        default=list(ARRANGEMENTS),
        metavar="NAME,…",
        help=f"default: {','.join(ARRANGEMENTS)}",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="of the numbers of requests; default: 1"
    )
    parser.add_argument("--input-len", type=int, default=INPUT_LEN, metavar="TOKENS")
    parser.add_argument("--output-len", type=int, default=OUTPUT_LEN, metavar="TOKENS")
    parser.add_argument(
        "--cores", type=int, default=CORES, metavar="N", help=f"that all share; default: {CORES}"
    )
    for name in ("up", "serve", "vllm", "vllm-pair"):
        parser.add_argument(f"--{name}-flags", default="", metavar="FLAGS", help=f"further ones of {name}")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "twinfang-side-by-side",
        help="keeps checkpoints and what vLLM compiles; default: in the folder for temporary files",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="figures, after each step; default: serving.json in --folder",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument(
        "--publish", action="store_true", help="a whole run into the repository: JSON, plot, README"
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="no run: figures of an earlier one"
    )
    return parser.parse_args()
