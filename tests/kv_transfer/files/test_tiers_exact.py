"""Greedy tokens are the same, whichever tier a prompt's start comes from (:mod:`testing.tiers.cell`)."""

from itertools import groupby

import pytest

from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from testing.tiers.cell import OTHERS, Cell, grid
from testing.tiers.prompts import shared_prompts
from testing.tiers.trial import NUM_TOKENS, expected_answers, try_cell

NUM_PROMPTS = 100
"""Of each cell of the whole grid. ``benchmarks.caches.tiers_exact`` runs it with 500."""


@pytest.fixture(scope="module")
def model_dirs(bundled_model, tmp_path_factory):
    made = {
        name: make_checkpoint(tmp_path_factory.mktemp(name), shape, seed=5)
        for name, shape in (("dense", DENSE_WITH_MTP), ("moe", MOE_WITH_MTP))
    }
    return {"bundled": bundled_model, **made}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Answers of references, each computed once."""
    found = {}

    def of(cell, model_dir, prompts):
        key = cell.reference, len(prompts)
        if key not in found:
            found[key] = expected_answers(cell, model_dir, tmp_path_factory.mktemp("none"), prompts)
        return found[key]

    return of


def check(cells, model_dir, directory, expected, num_prompts):
    refusals = [cell.refusal(model_dir, directory) for cell in cells]
    allowed = [cell for cell, refusal in zip(cells, refusals, strict=True) if refusal is None]
    for cell in allowed:
        prompts = shared_prompts(num_prompts, 1, cell.scale)
        outcome = try_cell(cell, model_dir, directory, prompts, expected(cell, model_dir, prompts))
        assert outcome.mismatches == 0, cell
        assert outcome.tokens == NUM_TOKENS * num_prompts
        assert cell.tiers == "device" or outcome.cached_tokens["host"] > 0, outcome
        assert cell.tiers != "restart" or outcome.cached_tokens["files"] > 0, outcome
        assert cell.drafter is None or outcome.drafts["accepted"] > 0
    if len(allowed) < len(cells):
        pytest.skip(next(filter(None, refusals)))


def chain(tiers, mode, drafter, ranks, kv, **more):
    return [Cell(one, mode, drafter, ranks, kv, **more) for one in tiers]


@pytest.mark.parametrize(
    "cells",
    [
        chain(["device", "host", "files", "restart"], "all", "mtp", 1, "fp8"),
        chain(["files", "restart"], "align", "ngram", 1, "auto"),
    ],
    ids=lambda cells: str(cells[0]),
)
def test_tokens_are_the_same_from_every_tier(bundled_model, tmp_path, expected, cells):
    check(cells, bundled_model, tmp_path, expected, num_prompts=40)


def chains(cells):
    return [list(group) for _, group in groupby(cells, key=lambda cell: cell.configuration)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cells", chains((*grid(), *OTHERS)), ids=lambda cells: str(cells[0]))
def test_tokens_are_the_same_in_the_whole_grid(model_dirs, tmp_path, expected, cells):
    check(cells, model_dirs[cells[0].model], tmp_path, expected, NUM_PROMPTS)
