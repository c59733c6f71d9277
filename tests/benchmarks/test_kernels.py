"""What ops must move is counted right, contenders compute the same, and the table says what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.cases import attention as attention_cases
from benchmarks.kernels.cases import delta as delta_cases
from benchmarks.kernels.cases import dense as dense_cases
from benchmarks.kernels.cases import mamba as mamba_cases
from benchmarks.kernels.cases import work
from benchmarks.kernels.cases.models import ExpertShape, eight_b
from benchmarks.kernels.cases.work import Work
from benchmarks.kernels.clock import num_sets, take_turns
from benchmarks.kernels.limits import Limits
from benchmarks.kernels.measurement import Bench
from benchmarks.kernels.report import NOT_RUN, section


@pytest.mark.parametrize(
    ("counted", "by_hand"),
    [
        # Two rows, one position, 3 heads of [4, 8], one group, two bytes each. State: 96 elements a row.
        # Inputs a row: x 12, dt 3, B and C 16, so 31; outputs 12. A, D, dt_bias: 9 numbers of 4 bytes.
        (
            work.selective_state_update(2, 1, 3, 4, 8, 1, 2),
            Work(read=768 + 124 + 36, written=768 + 48, flops=960),
        ),
        # Three positions: the state still comes once.
        (
            work.selective_state_update(2, 3, 3, 4, 8, 1, 2),
            Work(read=768 + 372 + 36, written=2304 + 144, flops=2880),
        ),
        # Ten tokens of the same: no state comes, one goes.
        (work.ssd_chunk_scan(10, 3, 4, 8, 1, 2), Work(read=620 + 36, written=384 + 240, flops=4800)),
        # Two rows, 2 key heads of 8, 4 value heads of 6, two bytes each. State: 192 elements a row. Inputs:
        # q and k 32, v 24, a and b 8 a row; outputs 24. A and dt_bias: 8 numbers of 4 bytes.
        (
            work.gated_delta_update(2, 1, 2, 8, 4, 6, 2),
            Work(read=1536 + 256 + 32, written=1536 + 96, flops=2688),
        ),
        (
            work.gated_delta_update(2, 3, 2, 8, 4, 6, 2),
            Work(read=1536 + 768 + 32, written=4608 + 288, flops=8064),
        ),
        (
            work.gated_delta_chunk(10, 2, 8, 4, 6, 2),
            Work(read=1280 + 32, written=768 + 480, flops=13440),
        ),
        # Functions of elements: silu is 15 instructions, a score or a logit that is drawn from 13, greedy 3.
        # Two rows of 5 channels, 4 taps: 3 states, an input, an output each; weight and bias are 25 elements.
        (
            work.causal_conv1d_update(2, 1, 5, 4, 2),
            Work(read=2 * (30 + 10 + 25), written=2 * 40, flops=80, operations=150),
        ),
        (
            work.causal_conv1d_update(2, 2, 5, 4, 2),
            Work(read=2 * (30 + 20 + 25), written=2 * 80, flops=160, operations=300),
        ),
        # Six tokens of the same.
        (
            work.causal_conv1d(6, 5, 4, 2),
            Work(read=2 * (30 + 25), written=2 * (30 + 15), flops=240, operations=450),
        ),
        # Two rows, 3 queries each, length 7: 5 + 6 + 7 pairs a row and head; 4 heads of 8, 2 of K and V.
        (
            work.paged_attention(2, 3, 7, 4, 2, 8, 2),
            Work(read=384 + 896, written=384, flops=4 * 36 * 32, operations=13 * 36 * 4),
        ),
        # A prompt of 4: 1 + 2 + 3 + 4 pairs.
        (
            work.paged_attention(1, 4, 4, 1, 1, 8, 4),
            Work(read=128 + 256, written=128, flops=4 * 10 * 8, operations=130),
        ),
        (work.store_kv(3, 2, 8, 2), Work(read=192 + 24, written=192)),
        (work.rms_norm(3, 10, 4), Work(read=160, written=120, flops=120)),
        (work.add_rms_norm(3, 10, 4), Work(read=280, written=240, flops=150)),
        (work.gated_rms_norm(3, 10, 4), Work(read=280, written=120, flops=150, operations=450)),
        (work.linear(3, 10, 20, 2), Work(read=2 * 230, written=2 * 60, flops=1200)),
        (
            work.quantized_linear(3, 10, 200, 2),
            Work(read=60 + 2000 + 8, written=1200, flops=12000, operations=6000),
        ),
        # One token, two experts of [5, 10] and back; three tokens touch all of 4.
        (work.experts(1, 4, 2, 10, 5, 2), Work(read=2 * (200 + 10) + 8, written=20, flops=400)),
        (work.experts(3, 4, 2, 10, 5, 2), Work(read=2 * (400 + 30) + 24, written=60, flops=1200)),
        (work.sampling(2, 3, 100, greedy=True), Work(read=2400, written=48, operations=1800)),
        (work.sampling(2, 3, 100, greedy=False), Work(read=2400, written=48, operations=7800)),
        # A row, two positions, one stop id: row and forced; slots, tokens, samples and flags of two; four
        # numbers, active, stop id. Then tokens, three numbers, active, accepted, five results.
        (work.accept_drafts(1, 2, 1), Work(read=16 + 42 + 16 + 1 + 8, written=16 + 12 + 1 + 4 + 40)),
    ],
)
def test_an_op_moves_and_computes_what_was_counted_by_hand(counted, by_hand):
    assert counted == by_hand


def tiny_model():
    whole = eight_b()
    config = replace(
        whole.config,
        dtype=torch.float32,
        vocab_size=50,
        hidden_size=32,
        mamba=replace(whole.mamba, num_heads=4, head_dim=8, state_size=16, num_groups=2, chunk_size=16),
        attention=replace(whole.attention, num_heads=4, num_kv_heads=2, head_dim=16),
        mlp=replace(whole.config.mlp, intermediate_size=48),
    )
    experts = ExpertShape(8, 3, 32, 24)
    delta = replace(whole.delta, num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=8)
    return replace(whole, name="tiny", device="cpu", config=config, experts=experts, delta=delta)


@pytest.mark.exhaustive
@torch.inference_mode()
def test_contenders_compute_the_same():
    model = tiny_model()
    cases = [
        mamba_cases.state_update(model, 3, 1),
        mamba_cases.state_update(model, 3, 4),
        mamba_cases.conv_update(model, 3, 4),
        mamba_cases.conv(model, 20),
        mamba_cases.scan(model, 64),
        mamba_cases.gated_norm(model, 5),
        delta_cases.state_update(model, 3, 1),
        delta_cases.state_update(model, 3, 4),
        delta_cases.scan(model, 150),
        delta_cases.gated_norm(model, 5),
        attention_cases.decode(model, 3, 40, 1),
        attention_cases.decode(model, 3, 40, 4),
        attention_cases.prefill(model, 40),
        dense_cases.norm(model, 3),
        dense_cases.add_norm(model, 3),
        dense_cases.linear(model, "up_proj", 3),
        dense_cases.quantized_linear(model, 3),
        dense_cases.experts(model, 5),
    ]
    bench = Bench(torch.device("cpu"), 0.0)
    for case in cases:
        absent = {}
        differences = bench.differences(case, case.contenders, absent)
        assert not absent
        assert differences, "no peer"
        assert all(difference < 1e-5 for difference in differences.values()), (case.op, differences)


def test_operands_rotate_over_as_much_as_the_weights_or_the_largest_cache():
    assert num_sets(1 << 20, 8 << 20) == 8
    assert num_sets(3 << 20, 8 << 20) == 3
    assert num_sets(100, 8 << 20) == 64
    assert num_sets(1 << 30, 16 << 30) == 1


class Rates:
    """A machine that copies 10 bytes/s, reads 20 and computes 100 FLOP/s."""

    measures_reads = True
    counts_operations = True

    def bytes_per_s(self, kind, bytes_moved, sets):
        return {"copy": 10.0, "read": 20.0}[kind]

    def flops_per_s(self):
        return 100.0


@pytest.mark.parametrize(
    ("of", "kind", "seconds"),
    [
        (Work(50, 50), "copy", 10.0),
        (Work(95, 5), "read", 5.0),
        (Work(50, 50, flops=900), "copy", 10.0),
        (Work(50, 50, flops=1100), "arithmetic", 11.0),
        (Work(50, 50, flops=1100, operations=100), "arithmetic", 13.0),
    ],
)
def test_the_limit_is_what_takes_longest(of, kind, seconds):
    limit = Limits(Rates()).of(of, sets=1)
    assert (limit.kind, limit.seconds) == (kind, seconds)


def test_functions_of_elements_cost_nothing_beside_a_gpu_s_products():
    rates = Rates()
    rates.counts_operations = False
    assert Limits(rates).of(Work(50, 50, flops=1100, operations=100), sets=1).seconds == 11.0


def test_contenders_take_turns_and_the_median_counts():
    order = []
    seconds = {"a": iter([9.0, 1.0, 2.0, 3.0, 4.0]), "b": iter([5.0] * 5)}

    def turn(name):
        def take():
            order.append(name)
            return next(seconds[name])

        return take

    assert take_turns({name: turn(name) for name in "ab"}, budget_s=0.0) == {"a": 3.0, "b": 5.0}
    assert order == ["a", "b"] * 5


def test_what_was_not_measured_is_said_and_has_no_figures():
    text = section(None, None)
    assert "Not measured yet" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "8 B" in line]
    assert len(rows) > 60
    assert all(f"| {NOT_RUN} |  |  |  |  |" in row for row in rows)


def report(**row):
    machine = {"gpu": "H", "processor": "P", "torch": "2.13", "load_average": 0.1}
    row = {
        "op": "rms_norm",
        "shape": "8 B",
        "read": 300_000,
        "written": 100_000,
        "flops": 0,
        "operations": 0,
        "sets": 4,
        "limit": {"kind": "copy", "rate": 4e11, "seconds": 1e-6},
        "seconds": {"ours": 2e-6, "F.rms_norm": 3e-6},
        "absent": {"mamba-ssm": "missing: no module"},
        "differences": {"F.rms_norm": 0.0},
        "launched": [],
    } | row
    return {
        "machine": machine,
        "threads": 1,
        "peers": {"torch": "2.13", "mamba-ssm": None},
        "limits": {"GEMM": 8e14},
        "rows": [row],
        "failures": [],
    }


def test_a_measured_row_tells_limit_peers_and_who_is_missing():
    text = section(None, report())
    expected = "| 400 kB | 2.0 | 200 GB/s | copy 400 GB/s | 0.5 | F.rms_norm 3.0 (1.5 ×), mamba-ssm missing |"
    assert f"| rms_norm | 8 B {expected}" in text
    assert "Peers: torch 2.13, mamba-ssm missing." in text


def test_a_peer_with_another_result_is_marked():
    assert "(another result)" in section(None, report(differences={"F.rms_norm": 0.3}))
