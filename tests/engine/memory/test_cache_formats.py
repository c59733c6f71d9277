"""Caches with fewer bits give the same tokens for all roles, batches, cache modes and drafts."""

import pytest
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.memory.cache_formats import ExactCuts
from engine.memory.caches import Caches
from engine.models import read_config
from engine.sanitizer.poison import Poison
from engine.schedule.host_store import HostStore
from engine.schedule.step_plan import Swap
from testing.checkpoints.families import make_family_checkpoint
from testing.checkpoints.random_checkpoint import MOE_WITH_MTP, make_checkpoint
from testing.engines.agreement import all_at_once, assert_all_agree, tokens_of
from testing.engines.handing_over import make_engine
from testing.engines.leading import lead_engine
from testing.oracles.recall_task import make_recall_prompt
from wire.errors import ConfigError

LENGTHS = (17, 65, 66, 130, 200)
FP8 = {"kv_cache_dtype": "fp8"}
BFLOAT16 = {"mamba_ssm_cache_dtype": "bfloat16"}
BY_CHANCE = {**BFLOAT16, "mamba_cache_stochastic_rounding": True}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), MOE_WITH_MTP, seed=5)


@pytest.fixture(scope="module")
def recall(bundled_model):
    """Prompts that the bundled model answers rightly, as tokens; and a text of answers' tokens."""
    tokenizer = Tokenizer.from_file(str(bundled_model / "tokenizer.json"))
    prompts = [make_recall_prompt(i, length) for i, length in enumerate(LENGTHS)]
    return prompts, [tokenizer.encode(p.prompt).ids for p in prompts], tokenizer.decode


def further(*values):
    """What only ``make test-all`` tries."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("formats", "mode", "k"),
    [
        further(FP8, "none", 0),
        further(FP8, "align", 3),
        (FP8, "all", 2),
        further(BFLOAT16, "align", 0),
        further(BFLOAT16, "none", 2),
        further(BFLOAT16, "all", 3),
        further(FP8 | BY_CHANCE, "none", 1),
        further(FP8 | BY_CHANCE, "align", 0),
        (FP8 | BY_CHANCE, "all", 3),
    ],
)
def test_narrow_caches_give_the_same_right_answers_handed_over_batched_and_with_drafts(
    bundled_model, recall, formats, mode, k
):
    prompts, tokens, decode = recall
    answers = assert_all_agree(bundled_model, tokens, mode, k, **formats)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert prompt.is_correct(decode(answer)), f"prompt of {prompt.num_tokens} tokens"


def test_narrow_caches_of_a_model_with_mtp_layers_and_experts_are_handed_over_too(random_model):
    prompts = [[(7 * i + length) % 160 for i in range(length)] for length in LENGTHS[:3]]
    assert_all_agree(random_model, prompts, "all", 3, drafter="mtp", **FP8, **BY_CHANCE)


@pytest.mark.parametrize(
    ("family", "formats", "mode", "k"),
    [
        ("qwen3.5", FP8 | BY_CHANCE, "all", 2),
        further("qwen3.5", BFLOAT16, "align", 3),
        ("mamba-2", BY_CHANCE, "all", 2),
        ("llama", FP8, "all", 2),
        further("falcon-h1", FP8 | BY_CHANCE, "align", 3),
    ],
)
def test_other_families_keep_the_same_bits_handed_over_batched_and_with_drafts(
    family, formats, mode, k, tmp_path
):
    model = make_family_checkpoint(tmp_path, family)
    prompts = [[(7 * i + length) % 90 for i in range(length)] for length in (17, 65, 66, 130)]
    assert_all_agree(model, prompts, mode, k, drafter="ngram", **formats)


def test_scales_of_a_layer_are_applied_where_it_stores_and_where_it_attends(bundled_model, recall):
    """By a power of two roundings are the same but those of the smallest values, which count 2^-9."""
    _, tokens, _ = recall
    plain, scaled = (make_engine(bundled_model, "both", **FP8) for _ in range(2))
    for block in scaled.model.layers.blocks:
        for mixer in block.mixers:
            if hasattr(mixer, "k_scale"):
                mixer.k_scale, mixer.v_scale = 0.25, 0.5
    assert tokens_of(all_at_once(scaled, tokens)) == tokens_of(all_at_once(plain, tokens))
    values = scaled.caches.kv.float().nan_to_num()
    assert values.abs().max() > 1.5 * plain.caches.kv.float().nan_to_num().abs().max()


def test_fp8_halves_what_bfloat16_keys_and_values_take(bundled_model):
    model = read_config(bundled_model, "bfloat16")
    narrow, wide = (
        EngineConfig(bundled_model, "both", dtype="bfloat16", kv_cache_dtype=dtype).demand(model)
        for dtype in ("fp8_e4m3", "auto")
    )
    assert 2 * narrow.token_bytes == wide.token_bytes
    assert narrow.slot_bytes == wide.slot_bytes


def test_an_unknown_format_is_refused(bundled_model):
    with pytest.raises(ConfigError, match=r"`kv_cache_dtype` must be one of auto, fp8, fp8_e4m3, got 'int4'"):
        EngineConfig(bundled_model, "both", kv_cache_dtype="int4")


@pytest.fixture
def fp8_caches(bundled_model):
    spec = EngineConfig(bundled_model, "both", **FP8).demand(read_config(bundled_model)).spec
    caches = Caches(spec, num_blocks=5, num_slots=3, block_size=4, device="cpu")
    caches.kv_words.random_(-128, 128)
    return caches


def test_freed_blocks_of_fp8_are_nan(fp8_caches):
    before = fp8_caches.kv_words.clone()
    Poison(fp8_caches).blocks(torch.tensor([1, 3]))
    assert fp8_caches.kv[[1, 3]].float().isnan().all()
    assert torch.equal(fp8_caches.kv_words[[0, 2, 4]], before[[0, 2, 4]])


def test_blocks_of_fp8_come_back_from_host_memory_bit_for_bit(fp8_caches):
    store, before = HostStore(fp8_caches), fp8_caches.kv_words.clone()
    store.save([Swap("preempted", (4, 1), 2)])
    fp8_caches.kv_words.fill_(0)
    store.restore([Swap("preempted", (2, 3), 1)])
    assert torch.equal(fp8_caches.kv_words[[2, 3]], before[[4, 1]])


@pytest.mark.exhaustive
def test_several_ranks_round_their_heads_as_one_that_has_all(bundled_model, recall):
    """They add up in another order: the same tokens."""
    _, tokens, _ = recall
    settings = {**FP8, **BY_CHANCE, "num_speculative": 2}
    alone = all_at_once(make_engine(bundled_model, "both", max_batch_tokens=256, **settings), tokens)
    with lead_engine(bundled_model, 2, **settings) as engine:
        assert tokens_of(all_at_once(engine, tokens)) == tokens_of(alone)


@pytest.mark.parametrize(
    ("grid", "start", "room", "expected"),
    [
        (64, 0, 1000, 199),  # all but the last of 200 tokens
        (64, 199, 1, 200),  # the last one
        (64, 0, 198, 192),
        (64, 128, 63, 128),  # too little room for a stretch
        (64, 100, 60, 128),  # a state that was brought back from anywhere
        (64, 192, 7, 199),
        (1, 0, 198, 198),
        (1, 150, 100, 199),
    ],
)
def test_chunks_end_on_the_grid_or_before_the_prompts_last_token(grid, start, room, expected):
    assert ExactCuts(grid).chunk_end(200, start, min(200, start + room)) == expected


def test_cache_modes_and_state_blocks_change_no_bit(bundled_model, recall):
    _, tokens, _ = recall
    settings = {"max_num_seqs": 5, "max_batch_tokens": 160, **FP8, **BY_CHANCE}
    kinds = ({"cache_mode": "none"}, {"cache_mode": "align"}, {"state_block_size": 64})
    answers = [all_at_once(make_engine(bundled_model, "both", **settings, **kind), tokens) for kind in kinds]
    assert answers[1:] == answers[:1] * 2


@pytest.mark.parametrize("formats", [BFLOAT16, BY_CHANCE], ids=["nearest", "by_chance"])
def test_a_budget_that_cuts_prompts_elsewhere_changes_no_bit(bundled_model, recall, formats):
    _, tokens, _ = recall
    wide, narrow = (
        make_engine(bundled_model, "both", max_num_seqs=5, max_batch_tokens=budget, **formats)
        for budget in (1024, 69)
    )
    assert all_at_once(narrow, tokens) == all_at_once(wide, tokens)


def test_bfloat16_halves_what_states_take(bundled_model):
    model = read_config(bundled_model)
    narrow, wide = (
        EngineConfig(bundled_model, "both", mamba_ssm_cache_dtype=dtype).demand(model)
        for dtype in ("bfloat16", "auto")
    )
    spec = wide.spec
    num_elements = spec.mamba_layers * spec.mamba_heads * spec.mamba_head_dim * spec.state_size
    assert wide.slot_bytes - narrow.slot_bytes == 2 * num_elements


def test_rounding_by_chance_is_part_of_the_fingerprint(bundled_model):
    by_chance, nearest = (
        make_engine(bundled_model, "both", max_batch_tokens=128, **formats)
        for formats in (BY_CHANCE, BFLOAT16)
    )
    assert by_chance.fingerprint != nearest.fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mamba_cache_stochastic_rounding": True}, "rounds nothing where states are kept in float32"),
        ({**BFLOAT16, "state_block_size": 48}, "`state_block_size` 48 is not a multiple of 64"),
        (
            {**BFLOAT16, "max_batch_tokens": 66, "max_num_seqs": 3},
            "`max_batch_tokens` 66 is below 67: it must hold 3 decoded tokens and 64 tokens of one prompt",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(bundled_model, settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(bundled_model, "both", **settings).demand(read_config(bundled_model))
