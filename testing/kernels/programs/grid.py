"""Compiles the programs of many models and loads, and sums the results up by kernel and architecture."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import triton

from testing.kernels.programs.assembly import Figures, figures
from testing.kernels.programs.exemptions import EXEMPTIONS
from testing.kernels.programs.launches import launch_step, steps
from testing.kernels.programs.models import LOADS, MODELS, QUANTISED, TYPICAL, Load
from testing.kernels.programs.recorder import Program, pretended_gpu
from testing.kernels.programs.rules import applies, exemption_for, faults, multiplies_wide_tiles


@dataclass(frozen=True)
class Result:
    """One program, compiled."""

    program: Program
    figures: Figures

    @property
    def complaints(self) -> list[str]:
        """The rules that the program breaks and that no exemption allows it to break."""
        name, architecture = self.program.name, self.program.target.arch
        return [
            f"{name} on sm_{architecture} ({self.program.origin}): {fault.rule} {fault.amount}"
            for fault in faults(self.program, self.figures)
            if exemption_for(name, architecture, triton.__version__, fault) is None
        ]


def recorded(capability: int, loads: Iterable[Load]) -> list[Program]:
    """Returns the programs of all models under these loads, each once."""
    loads = list(loads)
    with pretended_gpu(capability) as recorder:
        for load in loads:
            for model in MODELS:
                for rows in steps(load):
                    kind = "decode" if rows.is_decode else "prefill"
                    recorder.origin = ", ".join(filter(None, (model.name, kind, str(load))))
                    launch_step(model, load, rows)
        return list(recorder.programs.values())


def one_of_each(programs: Iterable[Program]) -> list[Program]:
    """Returns the first program of each kernel, and the first one that multiplies wide tiles."""
    kept: dict[tuple[str, bool], Program] = {}
    for program in programs:
        kept.setdefault((program.name, multiplies_wide_tiles(program)), program)
    return list(kept.values())


def quick(capability: int) -> list[Program]:
    """Returns one or two programs of every kernel."""
    return one_of_each(recorded(capability, (TYPICAL, QUANTISED)))


def whole(capability: int) -> list[Program]:
    return recorded(capability, LOADS)


_shared: Sequence[Program] = ()
"""What forked processes compile: programs can't be pickled."""


def compiled(programs: Sequence[Program], processes: int = 1) -> list[Result]:
    """Compiles the programs, in this order."""
    global _shared
    _shared = programs
    if processes == 1:
        found = [_figures_of(index) for index in range(len(programs))]
    else:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            found = pool.map(_figures_of, range(len(programs)), chunksize=1)
    return [Result(program, one) for program, one in zip(programs, found, strict=True)]


def _figures_of(index: int) -> Figures:
    return figures(_shared[index])


def unused_exemptions(results: Sequence[Result]) -> list[str]:
    """Returns the exemptions for this Triton that none of these programs needs."""
    needed = {
        (result.program.name, fault.rule, result.program.target.arch)
        for result in results
        for fault in faults(result.program, result.figures)
    }
    return [
        f"{entry.kernel} on sm_{architecture}: no exemption for {entry.rule} is needed, remove it"
        for entry in EXEMPTIONS
        for architecture in {result.program.target.arch for result in results}
        if applies(entry, architecture, triton.__version__)
        and (entry.kernel, entry.rule, architecture) not in needed
    ]


def table(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Returns a row for each kernel and architecture: the most that any of its programs takes."""
    rows: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        rows.setdefault((result.program.name, result.program.target.arch), []).append(result)
    return [
        {
            "kernel": name,
            "architecture": architecture,
            "programs": len(group),
            **{f"most_{field}": max(asdict(one.figures)[field] for one in group) for field in MOST},
            "programs_with_spills": sum(one.figures.stack_bytes > 0 for one in group),
            "programs_with_wide_products": sum(one.figures.wide_products > 0 for one in group),
        }
        for (name, architecture), group in sorted(rows.items())
    ]


MOST = ("registers", "stack_bytes", "looped_local_accesses", "shared_bytes", "narrow_copies", "wide_copies")
