from dataclasses import fields

import pytest
import torch

from kernels.speculation import accept_drafts as module
from kernels.speculation.accept_drafts import AcceptDrafts, accept_drafts, accept_drafts_reference

TABLES = ("tokens", "num_drafts", "num_computed", "state_slot", "active")
OUTPUTS = (*TABLES, "accepted", "results")


def accept(target, tensors):
    """Everything by name, rows among it."""
    if target.name == "triton":
        bound = {name: tensor for name, tensor in tensors.items() if name not in ("sampled", "is_finite")}
        module._launch(AcceptDrafts(**bound), len(tensors["rows"]), tensors["sampled"], tensors["is_finite"])
    else:
        accept_drafts(**tensors)


def batch(seed, num_positions, num_stop_ids, device="cpu", *, num_rows=40):
    """Random rows, every kind among them: tokens from a vocabulary so small that many drafts are right."""

    def ints(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(num_rows, generator=generator)[: num_rows - 5]
    rows = torch.cat([rows, torch.full((5,), num_rows)])
    num_rows, num_batch = num_rows + 1, len(rows)
    num_computed = ints(0, 20, num_rows)
    tensors = {
        "rows": rows,
        "sampled": ints(0, 3, num_batch, num_positions, dtype=torch.int64),
        "is_finite": torch.rand(num_batch, num_positions, generator=generator) < 0.95,
        "write_slots": ints(1, 99, num_batch, num_positions),
        "forced": ints(-6, 3, num_batch, dtype=torch.int64).clamp(min=-1),
        "tokens": ints(0, 3, num_rows, num_positions, dtype=torch.int64),
        "num_drafts": ints(0, num_positions, num_rows),
        "num_computed": num_computed,
        "state_slot": ints(1, 99, num_rows),
        "active": (torch.rand(num_rows, generator=generator) < 0.8).int(),
        "limit": num_computed + ints(0, 2 * num_positions + 4, num_rows),
        "max_drafts": ints(0, num_positions + 2, num_rows),
        "stop_ids": ints(-1, 30, num_rows, num_stop_ids, dtype=torch.int64),
        "accepted": torch.full((num_batch,), -7, dtype=torch.int32),
        "results": torch.full((num_batch, num_positions + 3), -7),
    }
    tensors["active"][-1] = 0
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def one_row(target, **changes):
    """A row with three drafts, two of them right. Rows 0 and 2 of the tables are nobody's."""
    values = {
        "sampled": [11, 12, 13, 14],
        "is_finite": [True, True, True, True],
        "write_slots": [21, 22, 23, 24],
        "forced": -1,
        "tokens": [10, 11, 12, 99],
        "num_drafts": 3,
        "num_computed": 100,
        "state_slot": 20,
        "active": True,
        "limit": 200,
        "max_drafts": 3,
        "stop_ids": [2, -1],
    } | changes
    batch_wide = ("sampled", "is_finite", "write_slots", "forced")
    int64 = ("sampled", "forced", "tokens", "stop_ids")
    tensors = {
        "rows": torch.tensor([1], device=target.device),
        "accepted": target.int32([-7]),
        "results": torch.full((1, 7), -7, device=target.device),
    }
    for name, value in values.items():
        dtype = torch.int64 if name in int64 else torch.int32
        tensor = torch.tensor(value, dtype=torch.bool if name == "is_finite" else dtype)
        blank = torch.zeros_like(tensor)
        rows = [tensor] if name in batch_wide else [blank, tensor, blank]
        tensors[name] = torch.stack(rows).to(target.device)
    accept(target, tensors)
    return {name: tensors[name][1].tolist() for name in TABLES} | {
        "accepted": tensors["accepted"].item(),
        "results": tensors["results"][0].tolist(),
    }


@pytest.mark.parametrize(
    ("num_positions", "num_stop_ids"), [(1, 1), (1, 4), (2, 0), (3, 2), (4, 1), (6, 5), (16, 3)]
)
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_the_reference(target, seed, num_positions, num_stop_ids):
    expected = batch(seed, num_positions, num_stop_ids)
    accept_drafts_reference(**expected)
    tensors = batch(seed, num_positions, num_stop_ids, target.device)
    accept(target, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.cpu(), expected[name]), name


def test_right_drafts_and_the_token_behind_them_are_gained(target):
    assert one_row(target) == {
        "accepted": 3,
        "results": [3, 1, 3, 11, 12, 13, 0],
        "tokens": [13, 0, 0, 0],
        "num_computed": 103,
        "state_slot": 23,
        "num_drafts": 3,
        "active": True,
    }


@pytest.mark.parametrize(
    ("tokens", "num_drafts", "accepted"),
    [
        ([10, 11, 12, 13], 3, 4),
        ([10, 11, 12, 13], 2, 3),  # the third stands behind the drafts: a dummy, however right
        ([10, 11, 12, 13], 0, 1),
        ([10, 99, 12, 13], 3, 1),  # right again behind a wrong one
        ([99, 11, 12, 13], 3, 4),  # the first is no draft
    ],
)
def test_drafts_count_up_to_the_first_wrong_one(target, tokens, num_drafts, accepted):
    row = one_row(target, tokens=tokens, num_drafts=num_drafts)
    assert row["accepted"] == accepted
    assert row["results"] == [accepted, 1, num_drafts, *[11, 12, 13, 14][:accepted], *[0] * (4 - accepted)]
    assert (row["num_computed"], row["state_slot"]) == (100 + accepted, 20 + accepted)


@pytest.mark.parametrize(
    ("stop_ids", "accepted", "active"),
    [
        ([11, -1], 1, False),
        ([12, 11], 1, False),
        ([13, 12], 2, False),
        ([13, -1], 3, False),
        ([14, 10], 3, True),
    ],
)
def test_the_first_stop_token_is_kept_and_ends_the_row(target, stop_ids, accepted, active):
    row = one_row(target, stop_ids=stop_ids)
    assert (row["accepted"], row["active"]) == (accepted, active)
    assert row["tokens"] == [10 + accepted, 0, 0, 0]
    assert row["num_drafts"] == (3 if active else 0)
    assert row["state_slot"] == 20 + accepted


@pytest.mark.parametrize(
    ("limit", "max_drafts", "num_drafts", "active"),
    [
        (104, 3, 0, False),
        (105, 3, 0, True),
        (106, 3, 1, True),
        (107, 1, 1, True),
        (110, 9, 3, True),
        (110, 0, 0, True),
    ],
)
def test_drafts_keep_within_the_limit(target, limit, max_drafts, num_drafts, active):
    row = one_row(target, limit=limit, max_drafts=max_drafts)  # 104 tokens are known afterwards
    assert (row["num_drafts"], row["active"]) == (num_drafts, active)


@pytest.mark.parametrize(("bad", "active"), [(0, False), (2, False), (3, True)])
def test_a_row_ends_where_a_gained_token_s_logits_were_not_finite(target, bad, active):
    row = one_row(target, is_finite=[i != bad for i in range(4)])
    assert row["results"][:3] == [3, active, 3]
    assert (row["active"], row["num_drafts"]) == (active, 3 * active)


def test_a_forced_row_gains_its_prompt_s_token_and_nothing_else_matters(target):
    row = one_row(target, forced=2, is_finite=[False] * 4)  # 2 is a stop token
    assert row == {
        "accepted": 1,
        "results": [1, 1, 0, 2, 0, 0, 0],
        "tokens": [2, 0, 0, 0],
        "num_computed": 101,
        "state_slot": 21,
        "num_drafts": 0,
        "active": True,
    }


def test_a_forced_token_may_be_zero_and_a_forced_row_may_reach_its_limit(target):
    row = one_row(target, forced=0, limit=102, tokens=[10, 0, 0, 0])
    assert (row["accepted"], row["active"], row["results"][3]) == (1, False, 0)


def test_padding_and_inactive_rows_change_no_table(target):
    tensors = batch(0, 4, 2, target.device)
    tensors["active"][:] = False
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    accept(target, tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in TABLES)
    assert tensors["accepted"].count_nonzero() == tensors["results"].count_nonzero() == 0


def test_rows_outside_the_batch_stay_as_they_are(target):
    tensors = batch(1, 3, 2, target.device)
    before = {name: tensors[name].clone() for name in TABLES}
    tensors |= {name: tensors[name][:7].contiguous() for name in ("rows", "accepted", "results")}
    accept(target, tensors | {name: tensors[name][:7] for name in ("sampled", "is_finite")})
    outside = torch.ones(len(before["active"]), dtype=torch.bool, device=target.device)
    outside[tensors["rows"]] = False
    assert all(torch.equal(tensors[name][outside], before[name][outside]) for name in TABLES)


def test_no_rows_are_fine(target):
    tensors = batch(0, 3, 1, target.device)
    for name in ("rows", "sampled", "is_finite", "write_slots", "forced", "accepted", "results"):
        tensors[name] = tensors[name][:0]
    accept(target, tensors)


def test_a_bound_call_writes_the_rows_that_it_names_and_no_others():
    tensors, expected = batch(2, 4, 2), batch(2, 4, 2)
    fresh = {name: tensors.pop(name)[:3] for name in ("sampled", "is_finite")}
    for name in ("rows", "sampled", "is_finite", "write_slots", "forced", "accepted", "results"):
        expected[name] = expected[name][:3]
    accept_drafts_reference(**expected)
    AcceptDrafts(**tensors)(3, **fresh)
    assert all(torch.equal(tensors[name], expected[name]) for name in TABLES)
    for name in ("accepted", "results"):
        assert torch.equal(tensors[name][:3], expected[name])
        assert (tensors[name][3:] == -7).all()


def test_what_was_sampled_may_be_strided(target):
    tensors, expected = batch(3, 4, 2, target.device), batch(3, 4, 2)
    for name in ("sampled", "is_finite"):
        tensors[name] = tensors[name].repeat_interleave(2, dim=1)[:, ::2]
    accept_drafts_reference(**expected)
    accept(target, tensors)
    assert all(torch.equal(tensors[name].cpu(), expected[name]) for name in OUTPUTS)


def test_fields_are_in_the_order_of_the_kernels_arguments():
    names = ["sampled", "is_finite", *(field.name for field in fields(AcceptDrafts))]
    assert list(module._accept_drafts_cpu.fn.__code__.co_varnames[: len(names)]) == names
