"""`twinfang plan`: the table, the same figures as JSON, and refusals in one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from testing.checkpoints.random_checkpoint import WITH_MOE, make_checkpoint
from twinfang.cli import main

GIB = 1 << 30

NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "head_dim": 128,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_head_dim": 64,
}
DENSE_8B = NEMOTRON | {
    "hybrid_override_pattern": "M-" * 24 + "*" * 4,
    "hidden_size": 4096,
    "num_key_value_heads": 8,
    "mamba_num_heads": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 8192,
}
MOE_30B = NEMOTRON | {
    "hybrid_override_pattern": "ME" * 23 + "*" * 6,
    "hidden_size": 2688,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "max_position_embeddings": 262144,
}


SLOTS = ("--speculative", "3", "--speculative-state", "slots")
MOE_30B_MTP = MOE_30B | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}


@pytest.fixture
def moe_30b_mtp(tmp_path: Path) -> str:
    return model(tmp_path / "moe-30b-mtp", MOE_30B_MTP)


@pytest.fixture
def dense_8b(tmp_path: Path) -> str:
    return model(tmp_path / "dense-8b", DENSE_8B)


@pytest.fixture
def moe_30b(tmp_path: Path) -> str:
    return model(tmp_path / "moe-30b", MOE_30B)


def model(directory: Path, config: dict[str, object]) -> str:
    """A model directory without weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def plan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command prints and how it ends, in this process: importing torch takes longer than a plan."""
    with (
        redirect_stdout(io.StringIO()) as stdout,
        redirect_stderr(io.StringIO()) as stderr,
        mock.patch.dict(os.environ, environment),
        mock.patch("twinfang.cli.configure_logs"),  # this process's logs are pytest's
    ):
        try:
            code: int | str | None = main(["plan", *arguments])
        except SystemExit as left:
            code = left.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


def figures(*arguments: str) -> dict:
    ran = plan(*arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_an_8b_model_on_80_gib(dense_8b: str):
    found = figures(dense_8b, "--gpu-memory", "80", "--cache-mode", "none")
    assert found["memory"]["weights_bytes"] == pytest.approx(8.1e9 * 2, rel=0.01)
    assert found["memory"]["weights_on_disk_bytes"] is None
    rest = 80 * GIB - found["memory"]["weights_bytes"]
    assert found["memory"]["cache_budget_bytes"] == int(rest * 0.85)
    assert found["memory"]["other_bytes"] == rest - int(rest * 0.85)
    conv = (128 * 64 + 2 * 8 * 128) * 3 * 2
    assert found["slot_bytes"] == 24 * (128 * 64 * 128 * 4 + conv)
    assert found["token_bytes"] == 4 * 2 * 8 * 128 * 2
    assert found["slots"]["total"] == 1 + 64
    assert found["plan"]["num_blocks"] == 1 + 64 * (512 + 1)
    assert found["plan"]["left_bytes"] == int(rest * 0.85) - found["plan"]["bytes"]


def test_a_30b_model_on_80_gib_has_a_state_of_47_mib_and_6_kib_a_token(moe_30b: str):
    found = figures(moe_30b, "--gpu-memory", "80", "--max-num-seqs", "32", *SLOTS)
    conv = (64 * 64 + 2 * 8 * 128) * 3 * 2
    assert found["memory"]["weights_bytes"] == pytest.approx(31.6e9 * 2, rel=0.01)
    assert found["slot_bytes"] == 23 * (64 * 64 * 128 * 4 + conv)
    assert found["token_bytes"] == 6144
    assert found["slots"] == {
        "null": 1,
        "running": 32 * 4,
        "leased": 0,
        "cached": 64,
        "read": 0,
        "total": 193,
        "bytes": 193 * found["slot_bytes"],
    }
    left = found["memory"]["cache_budget_bytes"] - found["slots"]["bytes"]
    assert found["plan"]["num_blocks"] == left // (16 * 6144)
    assert found["plan"]["num_full_seqs"] == (found["plan"]["num_blocks"] - 1) // 16384


def test_rows_that_replay_three_drafts_have_one_state_each(moe_30b: str):
    found = figures(moe_30b, "--gpu-memory", "80", "--max-num-seqs", "64", "--speculative", "3")
    assert found["speculative_state"] == "replay"
    assert found["slots"]["running"] == 64


def test_quantised_weights_are_counted_in_bytes(moe_30b: str):
    plain = figures(moe_30b, "--gpu-memory", "80")["memory"]
    quantization = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = Path(moe_30b) / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": quantization}))
    memory = figures(moe_30b, "--gpu-memory", "80")["memory"]
    assert (plain["weights_quantization"], memory["weights_quantization"]) == (None, "modelopt")
    kept = 2 * 2 * 131072 * 2688  # embedding and output head
    assert memory["weights_bytes"] == pytest.approx((plain["weights_bytes"] - kept) / 2 + kept, rel=0.002)
    assert "by config.json, quantised (modelopt)" in plan(moe_30b, "--gpu-memory", "80").stdout


def test_a_prefill_server_leases_one_state_a_sequence(dense_8b: str):
    found = figures("--model", dense_8b, "--gpu-memory", "80", "--role", "prefill", "--max-num-seqs", "8")
    assert found["slots"]["leased"] == 8
    assert found["slots"]["total"] == 1 + 8 + 8 + 16


def test_mtp_layers_cost_weights_and_kv_once_they_draft(moe_30b_mtp: str):
    sized = (moe_30b_mtp, "--gpu-memory", "80", "--max-num-seqs", "16")
    off, ngram, mtp = (
        figures(*sized, *more)
        for more in ((), ("--speculative", "3", "--drafter", "ngram"), ("--speculative", "3"))
    )
    assert [found["drafter"] for found in (off, ngram, mtp)] == [None, "ngram", "mtp"]
    assert off["memory"]["weights_bytes"] == ngram["memory"]["weights_bytes"]
    hidden, heads, kv_heads = 2688, 32 * 128, 2 * 128
    attention = 2 * (heads + kv_heads) * hidden
    experts = (128 * 2 * 1856 + 2 * 3712) * hidden
    more = mtp["memory"]["weights_bytes"] - off["memory"]["weights_bytes"]
    assert more == pytest.approx(2 * (2 * hidden * hidden + attention + experts), rel=0.01)
    assert (off["token_bytes"], ngram["token_bytes"], mtp["token_bytes"]) == (6144, 6144, 7168)
    table = [" ".join(line.split()) for line in plan(*sized, "--speculative", "3").stdout.splitlines()]
    assert "token 7 attention layers, 1 of them of MTP in bfloat16 7.00 KiB" in table
    assert any(line.startswith("weights by config.json, MTP layers too ") for line in table)


def test_a_prefill_server_keeps_mtp_kv_but_one_state_a_sequence(moe_30b_mtp: str):
    sized = (moe_30b_mtp, "--gpu-memory", "80", "--max-num-seqs", "8", *SLOTS)
    prefill, decode = (figures(*sized, "--role", role) for role in ("prefill", "decode"))
    assert prefill["block_bytes"] == decode["block_bytes"] == 16 * 7168
    assert (prefill["num_speculative"], prefill["slots"]["running"]) == (0, 8)
    assert decode["slots"]["running"] == 32


def test_the_table_has_the_figures_of_the_json(moe_30b: str):
    arguments = (moe_30b, "--gpu-memory", "80", "--max-num-seqs", "32", *SLOTS)
    ran = plan(*arguments)
    found = figures(*arguments)
    assert ran.returncode == 0
    assert ran.stderr == ""
    assert "moe-30b, bfloat16, role decode, cache mode all" in ran.stdout
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert "GPU 80.00 GiB" in lines
    assert "weights by config.json 58.83 GiB" in lines
    assert "state 23 recurrent layers, SSM float32 46.81 MiB" in lines
    assert "token 6 attention layers in bfloat16 6.00 KiB" in lines
    assert "running 32 sequences x (1 + 3) 128" in lines
    assert f"tokens {found['plan']['num_tokens']}" in lines
    assert f"sequences of full length {found['plan']['num_full_seqs']}" in lines


def test_a_gpus_rates_give_step_costs_and_prefill_to_decode(dense_8b: str):
    arguments = (dense_8b, "--gpu-memory", "80", "--gpu-tflops", "600", "--gpu-bandwidth", "2800")
    speed = figures(*arguments)["speed"]
    assert "not measured" in speed["source"]
    assert speed["prompt_s"] == pytest.approx(1000 * 2 * 7e9 / 600e12, rel=0.02)
    split = speed["best_split"]
    assert split["num_prefill"] + split["num_decode"] == 8
    rates = speed["prefill_server_requests_per_s"], speed["decode_server"]["requests_per_s"]
    assert split["requests_per_s"] == min(split["num_prefill"] * rates[0], split["num_decode"] * rates[1])
    table = plan(*arguments).stdout
    assert "speed, computed from the GPU's rates and not measured" in table
    assert f"prefill : decode = {split['num_prefill']} : {split['num_decode']}" in table
    long_answers = figures(*arguments, "--answer-tokens", "1000", "--servers", "9")["speed"]["best_split"]
    assert long_answers["num_decode"] > split["num_decode"] + 1
    assert figures(dense_8b, "--gpu-memory", "80")["speed"] is None


def test_what_does_not_fit_is_shown_and_refused_with_values_that_fit(moe_30b: str):
    arguments = (moe_30b, "--gpu-memory", "80", *SLOTS)
    ran = plan(*arguments)
    assert ran.returncode == 1
    assert "missing" in ran.stdout
    assert ran.stderr.count("\n") == 1
    assert "385 state slots (1 null + 64 sequences x (1 + 3) running + 128 cached)" in ran.stderr
    offered = [remedy.split() for remedy in ran.stderr.strip().rpartition(" would fit: ")[2].split(", ")]
    assert {"--gpu-memory", "--max-num-seqs", "--speculative"} <= {flag for flag, _ in offered}
    for flag, value in offered:
        given = (*arguments, flag, value) if flag not in arguments else arguments
        if flag in arguments:
            index = arguments.index(flag) + 1
            given = (*arguments[:index], value, *arguments[index + 1 :])
        assert figures(*given)["fits"]


def test_json_of_a_refusal_says_so_too(moe_30b: str):
    ran = plan(moe_30b, "--gpu-memory", "80", *SLOTS, "--json")
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    assert found["fits"] is False
    assert found["plan"] is None
    assert found["min_bytes"] > found["memory"]["cache_budget_bytes"]


def test_the_model_that_comes_with_twinfang_is_planned_for_a_cpu_with_its_weights_on_disk():
    ran = plan()
    assert ran.returncode == 0
    assert "bundled_model, float32" in ran.stdout
    assert "on disk" in ran.stdout
    assert "1.00 GiB" in ran.stdout


def test_cache_memory_is_the_budget_also_on_a_gpu(dense_8b: str):
    found = figures(dense_8b, "--gpu-memory", "80", "--cache-memory", "30")
    assert found["memory"]["cache_budget_bytes"] == 30 * GIB
    assert found["dtype"] == "bfloat16"


def test_host_memory_for_cached_prompts_is_shown_beside_the_budget(dense_8b: str):
    arguments = (dense_8b, "--gpu-memory", "80", "--role", "prefill", "--host-cache-size", "64G")
    found = figures(*arguments)
    memory = found["memory"]
    assert memory["host_cache_bytes"] == 64 * GIB
    assert memory["cache_budget_bytes"] == figures(*arguments[:-2])["memory"]["cache_budget_bytes"]
    num_blocks = 64 * GIB // found["block_bytes"]
    num_states = num_blocks // -(-found["slot_bytes"] // found["block_bytes"])
    files = ("--file-cache-dir", "/nowhere", "--file-cache-size", "200G")
    lines = [" ".join(line.split()) for line in plan(*arguments, *files).stdout.splitlines()]
    assert "files --file-cache-size, on a disk 200.00 GiB" in lines
    assert memory["file_cache_bytes"] == 0
    assert "host memory --host-cache-size, beside all of the above 64.00 GiB" in lines
    assert f"it holds or a mixture {num_states} states or {num_blocks} blocks" in lines
    assert "decode server" in plan(dense_8b, "--gpu-memory", "80", "--host-cache-size", "64").stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpu-memory", "8"], ["weights of 15.09 GiB", "--gpu-memory 8.00 GiB"]),
        (["--gpu-memory", "80", "--cache-memory", "70"], ["--cache-memory of 70.00 GiB", "lower"]),
        (["--cache-memory", "1"], ["--cache-memory", "too small", "--max-num-seqs"]),
        (["--gpu-memory", "80", "--max-model-len", "9000"], ["--max-model-len 9000", "8192"]),
        (["--gpu-memory", "80", "--max-num-seqs", "2048"], ["2048 sequences", "--max-num-seqs"]),
        (["--speculative", "1", "--drafter", "mtp"], ["has no MTP layers", "use --drafter ngram"]),
        (
            ["--gpu-memory", "80", "--gpu-tflops", "1", "--gpu-bandwidth", "1", "--prompt-tokens", "8000"],
            ["--prompt-tokens 8000", "8192", "--max-model-len"],
        ),
    ],
    ids=" ".join,
)
def test_what_can_not_be_is_one_line_and_exit_code_1(dense_8b: str, arguments, named):
    ran = plan(dense_8b, *arguments, "--log-level", "warning")
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    for part in named:
        assert part in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpu-memory", "none"], ["--gpu-memory", "GiB"]),
        (["--gpu-tflops", "600"], ["--gpu-memory and --gpu-bandwidth", "missing"]),
        (["--servers", "1"], ["--servers", "2"]),
        (["--speculative", "-1"], ["--speculative", "from 0 to 15"]),
        (["--speculative", "16"], ["--speculative", "from 0 to 15"]),
        (["--drafter", "eagle"], ["--drafter 'eagle'", "mtp or ngram"]),
        (["--ngram-min", "5"], ["--ngram-max 4", "--ngram-min 5"]),
        (["--steps-ahead", "1"], ["--steps-ahead"]),
        (["--role", "router"], ["--role", "prefill, decode or both"]),
        (["/nowhere"], ["--model '/nowhere'", "no such directory"]),
        (["/", "--model", "/"], ["both --model and / are given"]),
        (["--bogus", "1"], ["--bogus"]),
        ([".", "second"], ["second"]),
        (["--max-num-seqs", "9", "--max-batch-tokens", "8"], ["--max-num-seqs 9", "raise"]),
        (["--cache-mode", "none", "--state-block-size", "64"], ["--state-block-size 64", "none"]),
    ],
    ids=" ".join,
)
def test_a_bad_value_is_one_line_and_exit_code_2(arguments, named):
    ran = plan(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    for part in named:
        assert part in ran.stderr


def test_an_unreadable_configuration_is_named(tmp_path: Path):
    ran = plan(model(tmp_path / "other", {"architectures": ["GPT2LMHeadModel"]}))
    assert ran.returncode == 1
    assert "GPT2LMHeadModel" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_json_can_be_asked_for_in_the_environment():
    assert json.loads(plan(TWINFANG_JSON="yes").stdout)["fits"]


# --- models that keep only one of KV and states ----------------------------------------------------

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
CODESTRAL_7B = {
    "architectures": ["Mamba2ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
SPEED = ("--gpu-tflops", "600", "--gpu-bandwidth", "2800")


def test_a_model_without_states_is_planned_for_its_kv_alone(tmp_path: Path):
    arguments = (model(tmp_path / "llama-8b", LLAMA_8B), "--gpu-memory", "80", "--speculative", "3", *SPEED)
    ran, found = plan(*arguments), figures(*arguments)
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert "none no recurrent layers: nothing but KV is kept 0 B" in lines
    assert "token 32 attention layers in bfloat16 128.00 KiB" in lines
    assert not [line for line in lines if line.startswith(("state ", "running", "cached", "slots"))]
    assert (found["slot_bytes"], found["slots"]["running"], found["plan"]["num_slots"]) == (0, 0, 1)
    assert found["memory"]["weights_bytes"] == pytest.approx(8.03e9 * 2, rel=0.01)
    assert found["speed"]["decode_server"]["requests_per_s"] > 0


def test_a_model_without_kv_is_planned_for_its_states_alone(tmp_path: Path):
    arguments = (model(tmp_path / "codestral-7b", CODESTRAL_7B), "--gpu-memory", "80", *SPEED)
    ran, found = plan(*arguments), figures(*arguments)
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    enough = f"the states are enough for 64 sequences of up to {1 << 20} tokens"
    assert f"none no attention layers: {enough} 0 B" in lines
    assert not [line for line in lines if line.startswith(("token ", "block", "sequence", "tokens"))]
    assert (found["block_bytes"], found["plan"]["num_blocks"]) == (0, 1)
    assert (found["plan"]["num_tokens"], found["plan"]["num_full_seqs"]) == (None, None)
    assert found["memory"]["weights_bytes"] == pytest.approx(7.29e9 * 2, rel=0.01)
    assert found["speed"]["decode_server"]["bound"] in ("rows", "TPOT")


def test_states_alone_that_do_not_fit_are_refused_without_a_word_of_blocks(tmp_path: Path):
    refused = plan(model(tmp_path / "codestral-7b", CODESTRAL_7B), "--gpu-memory", "24")
    assert refused.returncode == 1
    assert "state slots" in refused.stderr
    assert "KV blocks" not in refused.stderr


def test_ranks_that_share_experts_have_their_part_of_them(tmp_path):
    folder = make_checkpoint(tmp_path / "moe", WITH_MOE)
    alone, shared = (
        json.loads(plan(str(folder), "--json", *flags).stdout)["memory"]["weights_bytes"]
        for flags in ((), ("--data-parallel-size", "4", "--enable-expert-parallel"))
    )
    assert alone - shared == 6 * 2 * 48 * 64 * 4  # of 8 experts up and down, in float32
