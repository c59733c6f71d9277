from dataclasses import fields

import pytest
import torch

from kernels.speculation import ngram_draft as module
from kernels.speculation.accept_drafts import accept_drafts
from kernels.speculation.ngram_draft import NgramDraft, ngram_draft_reference

UNKNOWN = -9  # in the history, behind what is known


def draft(target, tensors, *, min_n=2, max_n=4):
    """Everything by name, rows among it."""
    op, num_rows = NgramDraft(**tensors, min_n=min_n, max_n=max_n), len(tensors["rows"])
    if target.name == "triton":
        module._launch(op, num_rows)
    else:
        op(num_rows)


def batch(sequences, accepted, *, num_positions, max_len, device="cpu", budget=None, spare_rows=2):
    """Rows that just gained the last ``accepted`` tokens of their sequences; in the tables, in reverse."""
    num_batch = len(sequences)
    num_rows = num_batch + spare_rows + 1
    tensors = {
        "rows": torch.arange(num_batch).flip(0) + spare_rows,
        "accepted": torch.tensor(accepted, dtype=torch.int32),
        "results": torch.zeros((num_batch, num_positions + 3), dtype=torch.int64),
        "history": torch.full((num_rows, max_len), UNKNOWN, dtype=torch.int32),
        "tokens": torch.zeros((num_rows, num_positions), dtype=torch.int64),
        "num_drafts": torch.full((num_rows,), num_positions - 1 if budget is None else budget).int(),
        "num_computed": torch.zeros(num_rows, dtype=torch.int32),
        "active": torch.ones(num_rows, dtype=torch.int32),
    }
    for r, (q, sequence, a) in enumerate(zip(tensors["rows"].tolist(), sequences, accepted, strict=True)):
        before = torch.tensor(sequence[: len(sequence) - a], dtype=torch.int32)
        tensors["history"][q, : len(before)] = before[:max_len]
        tensors["results"][r, 3 : 3 + a] = torch.tensor(sequence[len(sequence) - a :])
        tensors["num_computed"][q] = len(sequence) - 1
        tensors["tokens"][q, 0] = sequence[-1]
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def drafts_of(target, sequence, *, accepted=1, budget=3, min_n=2, max_n=4, max_len=64):
    tensors = batch(
        [sequence], [accepted], num_positions=5, max_len=max_len, device=target.device, budget=budget
    )
    draft(target, tensors, min_n=min_n, max_n=max_n)
    assert tensors["history"][2, : len(sequence)].tolist() == sequence[:max_len]
    assert (tensors["history"][2, len(sequence) :] == UNKNOWN).all()
    m = int(tensors["num_drafts"][2])
    assert tensors["tokens"][2, 0] == sequence[-1]
    assert (tensors["tokens"][2, 1 + m :] == 0).all()
    return tensors["tokens"][2, 1 : 1 + m].tolist()


def random_batch(seed, num_positions, max_len, device="cpu"):
    """Sequences of three tokens at most, so that short suffixes occur often and long ones at times."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    lengths = [num_positions, max_len - 1, max_len, *ints(num_positions, max_len + 1, 9).tolist()]
    sequences = [ints(0, 1 + i % 3 + 1, length).tolist() for i, length in enumerate(lengths)]
    accepted = ints(0, num_positions + 1, len(lengths)).tolist()
    tensors = batch(sequences, accepted, num_positions=num_positions, max_len=max_len)
    tensors["active"] &= torch.rand(tensors["active"].shape, generator=generator) < 0.9
    tensors["num_drafts"] = ints(0, num_positions, *tensors["active"].shape).int()
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (2, 4), (3, 3), (5, 8)])
@pytest.mark.parametrize(("num_positions", "max_len"), [(1, 8), (2, 30), (4, 100), (16, 40)])
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_the_reference(target, seed, num_positions, max_len, min_n, max_n):
    expected = random_batch(seed, num_positions, max_len)
    ngram_draft_reference(**expected, min_n=min_n, max_n=max_n)
    tensors = random_batch(seed, num_positions, max_len, target.device)
    draft(target, tensors, min_n=min_n, max_n=max_n)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.cpu(), expected[name]), name


@pytest.mark.parametrize("length", [255, 256, 257, 258, 2048, 2049, 2050, 5000])
@pytest.mark.parametrize("place", ["start", "end", "nowhere"])
def test_long_histories_are_searched_to_their_start(target, length, place):
    """The lengths stand around the sizes of the stretches that are searched at once."""
    sequence = [*range(100, 100 + length - 3), 1, 2, 3]
    if place == "start":
        sequence[:4] = [1, 2, 3, 7]
    elif place == "end":
        sequence[-7:-3] = [1, 2, 3, 7]
    found = drafts_of(target, sequence, budget=1, max_len=length)
    assert found == ([] if place == "nowhere" else [7])


@pytest.mark.parametrize(
    ("sequence", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest of the longest
        ([0, 1, 2, 7, 1, 2, 8, 0, 1, 2], [7, 1, 2]),  # a longer suffix, though earlier
        ([9, 1, 2, 3, 4, 7, 1, 2, 3, 4, 8, 9, 1, 2, 3, 4], [8, 9, 1]),  # five agree, four are compared
        ([5, 6, 5, 6], [5, 6, 5]),  # on into its own drafts
        ([5, 5, 5], [5, 5, 5]),  # overlaps what it is compared with
        ([5, 5, 5, 5, 5, 5], [5, 5, 5]),
        ([1, 7, 8, 1, 7, 8, 1, 7], [8, 1, 7]),
        ([5, 5], []),  # only one token stands before
        ([3, 1, 2, 4, 2], []),  # one token agrees, two must
        ([1], []),
        ([1, 2, 3, 4], []),
    ],
)
def test_drafts_what_followed(target, sequence, drafts):
    assert drafts_of(target, sequence) == drafts


@pytest.mark.parametrize(("budget", "drafts"), [(0, []), (1, [3]), (2, [3, 4]), (4, [3, 4, 5, 1])])
def test_no_more_than_the_budget(target, budget, drafts):
    assert drafts_of(target, [1, 2, 3, 4, 5, 1, 2], budget=budget) == drafts


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("accepted", [1, 3])
def test_a_period_fills_the_whole_budget(target, period, accepted):
    """Fails if the copy ends with what is known."""
    num_known, budget = 2 * period + 3, 15
    tensors = batch(
        [[i % period for i in range(num_known)]],
        [accepted],
        num_positions=1 + budget,
        max_len=num_known + 2,  # the drafts would not fit into the history
        device=target.device,
    )
    draft(target, tensors)
    assert tensors["num_drafts"][2] == budget
    drafts = tensors["tokens"][2, 1:].tolist()
    assert drafts == [i % period for i in range(num_known, num_known + budget)]
    assert (tensors["history"][2, num_known:] == UNKNOWN).all()


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_tokens_just_gained_are_looked_up_and_looked_up_in(target, accepted):
    assert drafts_of(target, [6, 1, 2, 3, 1, 2], accepted=accepted) == [3, 1, 2]


def test_a_sequence_may_fill_its_history_and_nothing_is_written_beyond(target):
    sequence = [1, 2, 3, 4, 1, 2]
    assert drafts_of(target, sequence, accepted=2, max_len=6) == [3, 4, 1]
    for max_len in (5, 4, 3):
        tensors = batch([sequence], [2], num_positions=5, max_len=max_len, device=target.device, spare_rows=1)
        draft(target, tensors)
        assert tensors["history"][1].tolist() == sequence[:max_len]
        assert (tensors["history"][[0, 2]] == UNKNOWN).all()
        assert tensors["num_drafts"][1] == 0


def test_a_finished_row_s_tokens_join_its_history_but_draft_nothing(target):
    sequence = [1, 2, 3, 1, 2]
    tensors = batch([sequence], [2], num_positions=3, max_len=8, device=target.device, spare_rows=0)
    tensors["active"][0] = False
    before = {name: tensors[name].clone() for name in ("tokens", "num_drafts")}
    draft(target, tensors)
    assert tensors["history"][0, :5].tolist() == sequence
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_padding_changes_nothing(target):
    tensors = batch([[1, 2, 1, 2]] * 3, [0, 0, 0], num_positions=3, max_len=8, device=target.device)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    draft(target, tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    draft(target, tensors | {name: tensors[name][:0] for name in ("rows", "accepted", "results")})


def test_a_bound_call_writes_the_rows_that_it_names_and_no_others():
    tensors = batch([[1, 2, 3, 1, 2]] * 3, [1, 1, 1], num_positions=3, max_len=8)
    NgramDraft(**tensors, min_n=2, max_n=4)(2)
    first, second, third = tensors["rows"].tolist()
    assert tensors["tokens"][[first, second], 1:].tolist() == [[3, 1], [3, 1]]
    assert tensors["tokens"][third, 1:].tolist() == [0, 0]


def test_a_repeating_answer_is_drafted_in_full_step_after_step(target):
    """accept_drafts leaves what ngram_draft reads; the target goes on counting 0 … 5 for ever."""
    num_positions, limit, sequence = 4, 60, [0, 1, 2, 3, 4, 5, 0, 1]
    tensors = batch([sequence], [1], num_positions=num_positions, max_len=limit, device=target.device)
    q, gained = int(tensors["rows"][0]), []
    draft(target, tensors)
    state = {name: tensors[name] for name in ("tokens", "num_drafts", "num_computed", "active")}
    table = torch.zeros_like(tensors["num_drafts"])
    while tensors["active"][q]:
        newest = int(tensors["tokens"][q, 0])
        accept_drafts(
            tensors["rows"],
            sampled=(newest + 1 + torch.arange(num_positions, device=target.device)[None]) % 6,
            is_finite=torch.ones((1, num_positions), dtype=torch.bool, device=target.device),
            write_slots=target.int32([[1] * num_positions]),
            forced=torch.full((1,), -1, device=target.device),
            state_slot=table.clone(),
            limit=table + limit,
            max_drafts=table + num_positions - 1,
            stop_ids=torch.full((len(table), 1), -1, device=target.device),
            accepted=tensors["accepted"],
            results=tensors["results"],
            **state,
        )
        gained.append(int(tensors["accepted"][0]))
        draft(target, tensors)
    assert tensors["history"][q].tolist() == [i % 6 for i in range(limit)]
    assert gained == [num_positions] * ((limit - len(sequence)) // num_positions)


def test_fields_are_in_the_order_of_the_kernels_arguments():
    names = [field.name for field in fields(NgramDraft)]
    assert list(module._ngram_draft_cpu.fn.__code__.co_varnames[: len(names)]) == names
