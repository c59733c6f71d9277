"""Caches in fewer bits: the same tokens whatever the roles, batches, cache modes and drafts."""

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.recall_task import make_recall_prompt
from engine.caches import Caches
from engine.config import EngineConfig
from engine.host_store import HostStore
from engine.models import read_config
from engine.poison import Poison
from engine.scheduler import Swap
from tests.checkpoints import MOE_WITH_MTP, make_checkpoint
from tests.engine.test_engine import greedy, hand_over, make_engine, run
from wire.errors import ConfigError

LENGTHS = (17, 65, 66, 130, 200)
FP8 = {"kv_cache_dtype": "fp8"}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), MOE_WITH_MTP, seed=5)


@pytest.fixture(scope="module")
def recall(bundled_model):
    """Prompts that the bundled model answers rightly, as tokens; and a text of answers' tokens."""
    tokenizer = Tokenizer.from_file(str(bundled_model / "tokenizer.json"))
    prompts = [make_recall_prompt(i, length) for i, length in enumerate(LENGTHS)]
    return prompts, [tokenizer.encode(p.prompt).ids for p in prompts], tokenizer.decode


def all_at_once(engine, prompts):
    return run(engine, [greedy(str(i), tokens) for i, tokens in enumerate(prompts)])


def one_by_one(engine, prompts):
    return {str(i): run(engine, [greedy(str(i), tokens)])[str(i)] for i, tokens in enumerate(prompts)}


def handed_over(source, sink, prompts):
    found = {}
    for i, tokens in enumerate(prompts):
        hand_over(source, sink, tokens, name=str(i))
        found |= run(sink)
    return found


def assert_all_agree(model, prompts, mode, k, **settings):
    """Alone and without drafts, in a batch with them, handed over; cold and warm. Returns the tokens."""
    settings = {"cache_mode": mode, "max_batch_tokens": 160, "max_num_seqs": 5, **settings}
    alone = one_by_one(make_engine(model, "both", **settings), prompts)
    drafting = {**settings, "num_speculative": k}
    both = make_engine(model, "both", **drafting)
    source, sink = (make_engine(model, role, **drafting) for role in ("prefill", "decode"))
    for warmth in ("cold", "warm"):
        assert all_at_once(both, prompts) == alone, warmth
        assert handed_over(source, sink, prompts) == alone, warmth
    return alone


@pytest.mark.parametrize(("mode", "k"), [("none", 0), ("align", 3), ("all", 2)])
def test_fp8_kv_gives_the_same_right_answers_handed_over_batched_and_with_drafts(
    bundled_model, recall, mode, k
):
    prompts, tokens, decode = recall
    answers = assert_all_agree(bundled_model, tokens, mode, k, **FP8)
    for i, prompt in enumerate(prompts):
        assert prompt.is_correct(decode(answers[str(i)])), f"prompt of {len(tokens[i])} tokens"


def test_fp8_kv_of_mtp_layers_is_handed_over_too(random_model):
    prompts = [[(7 * i + length) % 160 for i in range(length)] for length in LENGTHS[:3]]
    assert_all_agree(random_model, prompts, "all", 3, drafter="mtp", **FP8)


def test_scales_of_a_layer_are_applied_where_it_stores_and_where_it_attends(bundled_model, recall):
    """By a power of two all roundings are the same."""
    _, tokens, _ = recall
    plain, scaled = (make_engine(bundled_model, "both", **FP8) for _ in range(2))
    for block in scaled.model.layers.blocks:
        for mixer in block.mixers:
            if hasattr(mixer, "k_scale"):
                mixer.k_scale, mixer.v_scale = 0.25, 0.5
    assert all_at_once(scaled, tokens) == all_at_once(plain, tokens)
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
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype must be one of auto, fp8, fp8_e4m3, got 'int4'"):
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
    store.save(Swap("preempted", (4, 1), 2))
    fp8_caches.kv_words.fill_(0)
    store.restore(Swap("preempted", (2, 3), 1))
    assert torch.equal(fp8_caches.kv_words[[2, 3]], before[[4, 1]])
