"""The engine's settings for speculation: refusals, the choice of the drafter, and the size of the pools."""

from dataclasses import replace

import pytest
import torch

from engine.checkpoint.model_config import ModelConfig, MtpConfig
from engine.config import EngineConfig
from engine.cost.step_memory import gpu_cache_bytes
from engine.group.data_parallel import DataParallel
from engine.models import read_config
from wire.errors import ConfigError


@pytest.fixture(scope="module")
def plain(bundled_model) -> ModelConfig:
    return replace(read_config(bundled_model), mtp=None)


@pytest.fixture(scope="module")
def with_mtp(plain) -> ModelConfig:
    return replace(plain, mtp=MtpConfig(1, ("attention", "mlp")))


@pytest.fixture
def configure(bundled_model):
    def make(role="decode", **settings) -> EngineConfig:
        return EngineConfig(bundled_model, role, device="cpu", **settings)

    return make


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative": -1}, "`num_speculative` must be from 0 to 15, got -1"),
        ({"num_speculative": 16}, "`num_speculative` must be from 0 to 15, got 16"),
        ({"drafter": "eagle"}, "`drafter` must be mtp or ngram, got 'eagle'"),
        ({"ngram_min": 0}, "`ngram_min` must be at least 1, got 0"),
        ({"ngram_min": 5}, "`ngram_max` 4 is below `ngram_min` 5"),
        ({"steps_ahead": 2}, "`steps_ahead` must be 0 or 1, got 2"),
        ({"step_deadline_s": -1.0}, "`step_deadline_s` must be at least 0, got -1.0"),
        ({"step_deadline_s": float("nan")}, "`step_deadline_s` must be at least 0, got nan"),
        (
            {"max_num_seqs": 8, "max_batch_tokens": 31, "num_speculative": 3},
            "`max_batch_tokens` 31 is below `max_num_seqs` 8 x (1 + `num_speculative` 3)",
        ),
    ],
    ids=str,
)
def test_values_that_can_not_work_are_refused_by_their_setting(configure, settings, message):
    with pytest.raises(ConfigError) as refusal:
        configure(**settings)
    assert message in refusal.value.message


def test_a_step_has_to_hold_the_drafts_of_a_decode_server_alone(configure):
    limits = {"max_num_seqs": 8, "num_speculative": 3}
    assert configure("decode", max_batch_tokens=32, **limits).num_positions == 4
    assert configure("prefill", max_batch_tokens=8, **limits).num_positions == 1


def test_without_speculation_nobody_drafts_and_a_row_has_one_position(configure, plain, with_mtp):
    for drafter in (None, "mtp", "ngram"):
        config = configure(drafter=drafter)
        assert config.num_positions == 1
        for model in (plain, with_mtp):
            assert config.resolve_drafter(model) is None
            assert not config.loads_mtp(model)


def test_mtp_layers_draft_where_there_are_some_and_ngrams_elsewhere(configure, plain, with_mtp):
    config = configure(num_speculative=3)
    assert config.resolve_drafter(with_mtp) == "mtp"
    assert config.resolve_drafter(plain) == "ngram"
    assert configure(num_speculative=3, drafter="ngram").resolve_drafter(with_mtp) == "ngram"


def test_mtp_of_a_checkpoint_without_it_is_refused_with_a_remedy(configure, plain):
    config = configure(num_speculative=1, drafter="mtp")
    for ask in (config.resolve_drafter, config.loads_mtp, config.demand):
        with pytest.raises(ConfigError, match=r"has no MTP layers .*; use `drafter` ngram"):
            ask(plain)


@pytest.mark.parametrize("role", ["decode", "both"])
def test_each_draft_is_a_position_and_a_slot_of_every_running_request(configure, plain, role):
    config = configure(role, num_speculative=3, max_num_seqs=8)
    assert config.num_positions == 4
    assert config.demand(plain).slots.running == 8 * 4
    assert config.demand(plain).num_speculative == 3


def test_a_prefill_server_drafts_nothing_but_keeps_the_drafting_layers_kv(configure, plain, with_mtp):
    """It fills that KV, which travels with the block: both servers' blocks have to be alike."""
    prefill, decode = (
        configure(role, num_speculative=3, max_num_seqs=8, max_model_len=30) for role in ("prefill", "decode")
    )
    assert prefill.num_positions == 1
    assert prefill.loads_mtp(with_mtp)
    asked = prefill.demand(with_mtp)
    assert (asked.num_speculative, asked.slots.running) == (0, 8)
    assert asked.within(1 << 30).table_columns == 2
    assert asked.block_bytes == decode.demand(with_mtp).block_bytes
    more_layers = asked.spec.attn_layers - prefill.demand(plain).spec.attn_layers
    assert more_layers == 1


def test_only_a_gpu_runs_a_step_ahead_unless_told(configure):
    assert configure().resolve_steps_ahead(torch.device("cuda")) == 1
    assert configure().resolve_steps_ahead(torch.device("cpu")) == 0
    assert configure(steps_ahead=0).resolve_steps_ahead(torch.device("cuda")) == 0
    assert configure(steps_ahead=1).resolve_steps_ahead(torch.device("cpu")) == 1
    assert configure(sanitize=True).resolve_steps_ahead(torch.device("cuda")) == 0
    with pytest.raises(ConfigError, match=r"`steps_ahead` 1 and `sanitize` exclude each other.*leave one"):
        configure(steps_ahead=1, sanitize=True)


def test_only_a_gpu_s_steps_have_a_deadline_unless_told(configure):
    assert configure().resolve_step_deadline(torch.device("cuda")) == 60
    assert configure().resolve_step_deadline(torch.device("cpu")) == 0
    assert configure(step_deadline_s=0.0).resolve_step_deadline(torch.device("cuda")) == 0
    assert configure(step_deadline_s=2.0).resolve_step_deadline(torch.device("cpu")) == 2


def test_a_gpu_has_an_index_that_a_thread_can_make_current(configure):
    configs = [replace(configure(), device="cuda"), replace(configure(), device="cuda:1")]
    assert [str(config.resolve_device()) for config in configs] == ["cuda:0", "cuda:1"]


def test_ranks_that_share_no_experts_have_a_gpu_each(configure):
    ranks = [
        replace(configure(), device="cuda", data_parallel=DataParallel(rank, 2, local_rank=rank))
        for rank in (0, 1)
    ]
    assert [str(config.resolve_device()) for config in ranks] == ["cuda:0", "cuda:1"]


def test_memory_that_torch_has_freed_counts_as_free(configure, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: calls.append("mem_get_info") or (1 << 30, 0))
    assert configure().cache_budget(torch.device("cuda:0"), 0) == gpu_cache_bytes(1 << 30, 0)
    assert calls == ["empty_cache", "mem_get_info"]


def test_pools_leave_steps_what_they_need():
    assert gpu_cache_bytes(1000, 100) == 850
    assert gpu_cache_bytes(1000, 400) == 600
    assert gpu_cache_bytes(1000, 2000) == 0
