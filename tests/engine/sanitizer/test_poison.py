"""A decode step reads and writes the memory of its rows and no other: all the rest of both pools is NaN.

Steps are launched below the scheduler, of made-up requests whose blocks, slots and rows lie anywhere. They
are padded into captured sizes, in buffers that name other requests which are still active: what a padding
row, a dummy draft or a drafting loop touches beyond its own would be theirs.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.row_kinds import PlannedRow, StateBoundary, decode_slots
from engine.schedule.capacity import blocks_for
from engine.schedule.step_plan import StepPlan
from engine.step.buffers import capture_sizes
from testing.checkpoints.random_checkpoint import MOE_WITH_MTP, make_checkpoint
from wire.messages.sampling_params import SamplingParams

MAX_ROWS, BLOCK_SIZE, MAX_MODEL_LEN = 48, 4, 64
NUM_OTHERS = 8
SIZES = [1, 2, 4, 8, 16, 32, 48]
KINDS = {
    "one position": ("both", 0, None),
    "one position and mtp": ("prefill", 3, "mtp"),
    "four positions": ("both", 3, "ngram"),
    "four positions and mtp": ("both", 3, "mtp"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), MOE_WITH_MTP, seed=3)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def engine(request, checkpoint):
    role, k, drafter = request.param
    config = EngineConfig(
        checkpoint,
        role,
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_ROWS,
        max_batch_tokens=4 * MAX_ROWS,
        block_size=BLOCK_SIZE,
        cache_memory_bytes=64 << 20,
        num_speculative=k,
        drafter=drafter,
    )
    return Engine(config)


@dataclass(frozen=True)
class Life:
    """A planned decode row, and the drafts that it tries."""

    row: PlannedRow
    drafts: list[int]

    def places(self, begin, end):
        """``(block, offset)`` of its tokens ``begin … end - 1``, as far as it has blocks."""
        blocks = self.row.request.memory.block_ids
        end = min(end, len(blocks) * BLOCK_SIZE)
        return [(blocks[at // BLOCK_SIZE], at % BLOCK_SIZE) for at in range(begin, end)]


def make_lives(engine, num_rows, choose):
    """Requests of any length whose newest state is in a slot of theirs, or in one that they only read."""
    width, vocab = engine.config.num_positions, engine.model.config.vocab_size
    blocks, slots, rows = (
        iter(choose.sample(range(first, end), end - first))
        for first, end in ((1, engine.caches.num_blocks), (1, engine.caches.num_slots), (0, MAX_ROWS))
    )
    lives = []
    for number in range(num_rows):
        length = choose.randint(1, 40)
        tokens = [choose.randrange(vocab) for _ in range(length + 2)]
        params = None if engine.config.role == "prefill" else SamplingParams(max_tokens=20, temperature=0)
        request = Request(str(number), tokens[: length + 1 + (params is None)], params)
        request.row, request.num_computed, request.num_planned = next(rows), length, length
        num_blocks = blocks_for(length + choose.randint(1, 2 * width), BLOCK_SIZE)
        request.memory.block_ids = [next(blocks) for _ in range(num_blocks)]
        request.memory.slots = [next(slots) for _ in range(width)]
        request.memory.state_index = choose.randrange(width)
        request.memory.read_slot = choose.choice([0, next(slots)])
        kept = StateBoundary(length + choose.randint(1, width + 1), next(slots))
        row = PlannedRow(request, length, 1, choose.choice([(), (kept,)]))
        lives.append(Life(row, [choose.randrange(vocab) for _ in range(width - 1)]))
    return lives


def scatter(engine, lives, elsewhere):
    """Random KV and states where rows have them, ``elsewhere`` in all other memory but the null entries."""
    torch.manual_seed(0)
    layers = engine.caches.layers
    engine.caches.kv[1:] = elsewhere
    places = torch.tensor([place for life in lives for place in life.places(0, life.row.num_before)])
    kv = engine.caches.kv
    kv[places[:, 0], :, :, :, places[:, 1]] = torch.randn(len(places), *kv.shape[1:4], kv.shape[5])
    slots = torch.tensor([life.row.request.memory.state_slot for life in lives])
    for view in (*layers.conv, *layers.ssm):
        view[1:] = elsewhere
        view[slots] = torch.randn(len(slots), *view.shape[1:])


def begin(engine, lives):
    state = engine._runner.state
    for life in lives:
        row = life.row.request.row
        engine._runner.begin(life.row.request)
        state.tokens[row, 1:] = torch.tensor(life.drafts)
        state.num_drafts[row] = len(life.drafts)


@torch.inference_mode()
def launch(engine, lives, others):
    """What the rows' step brings: results, and the row tables as it leaves them. ``others`` are not in it."""
    runner = engine._runner
    begin(engine, [*lives, *others])
    stale = [life.row for life in others] * (MAX_ROWS // NUM_OTHERS)
    runner._buffers.load(stale, MAX_ROWS)
    plan = StepPlan([life.row for life in lives], [])
    results = runner.launch(plan, runner.shape_of(plan)).read()
    tables = {name: t.clone() for name, t in vars(runner.state).items() if isinstance(t, torch.Tensor)}
    for life in (*lives, *others):
        runner.end(life.row.request.row)
    return results, tables


def assert_only_its_own_changed(engine, lives, kv, state):
    """Bit for bit; ``kv`` and ``state`` are copies from before the step."""
    width = engine.config.num_positions
    changed = engine.caches.kv.view(torch.int32) != kv.view(torch.int32)
    for life in lives:
        for block, offset in life.places(life.row.num_before, MAX_MODEL_LEN):
            changed[block, :, :, :, offset] = False
        for block, offset in life.places(life.row.num_before, life.row.num_before + width):
            assert engine.caches.kv[block, :, :, :, offset].isfinite().all()
    assert not changed.any(), f"blocks {changed.flatten(1).any(1).nonzero().flatten().tolist()}"
    written = [slot for life in lives for slot in decode_slots(life.row, width)]
    others = (engine.caches.state != state).any(1)
    others[written] = False
    assert not others.any(), f"slots {others.nonzero().flatten().tolist()}"
    for view in (*engine.caches.layers.conv, *engine.caches.layers.ssm):
        assert view[written].isfinite().all()


def check(engine, sizes, num_rows):
    engine._runner._buffers._sizes = sizes
    lives = make_lives(engine, num_rows + NUM_OTHERS, random.Random(num_rows))
    lives, others = lives[:num_rows], lives[num_rows:]
    scatter(engine, lives, elsewhere=0.0)
    expected, expected_tables = launch(engine, lives, others)
    scatter(engine, lives, elsewhere=float("nan"))
    kv, state = engine.caches.kv.clone(), engine.caches.state.clone()
    results, tables = launch(engine, lives, others)
    assert all(result.accepted and result.is_finite for result in results)
    assert results == expected
    assert_only_its_own_changed(engine, lives, kv, state)
    for name, table in tables.items():
        assert torch.equal(table, expected_tables[name]), name
    for request in (life.row.request for life in others):
        assert tables["num_computed"][request.row] == request.num_computed, "it was not in the step"


def test_a_padded_step_touches_nothing_but_what_its_rows_own(engine):
    assert set(SIZES) <= set(capture_sizes(MAX_ROWS))
    for num_rows in random.Random(0).sample(range(1, 34), 33):
        check(engine, SIZES, num_rows)


@pytest.mark.parametrize("sizes", [[48], [3, 17, 48]], ids=["one size", "odd sizes"])
def test_so_it_is_whatever_sizes_are_captured(engine, sizes):
    for num_rows in (18, 1, 17, 3):
        check(engine, sizes, num_rows)
