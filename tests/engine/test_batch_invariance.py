"""A batch-invariant engine gives the same bits alone, in a batch, handed over, and with drafts.

These tests run on a CPU, in both dtypes of a model. A GPU has other kernels for the same rules; their own
tests show that they keep them.
"""

from dataclasses import replace

import pytest
import torch

from engine.checkpoint.made_weights import MadeWeights, NoValues
from engine.config import EngineConfig
from engine.memory.cache_formats import ExactCuts
from engine.models import build_model, load_model, read_config
from engine.models.layers import linear
from engine.models.layers.attention import Attention
from engine.models.layers.moe import Moe
from engine.parallel.tensor_parallel import TensorParallel
from testing.checkpoints.families import make_family_checkpoint
from testing.checkpoints.random_checkpoint import DENSE, MOE_WITH_MTP, make_checkpoint
from testing.engines.agreement import all_at_once, assert_all_agree, one_by_one, tokens_of
from testing.engines.handing_over import make_engine
from testing.engines.leading import lead_engine
from testing.engines.sequences import Driver, Sequence
from testing.oracles.ties import MAX_TIES_BFLOAT16, count_ties, tie_of
from testing.simulated_gpu.engines import Setting, Simulated, all_kinds_of_asks
from wire.errors import ConfigError

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
LENGTHS = (2, 17, 65, 66, 130)


def prompts(vocab=90):
    return [[(7 * i + length) % vocab for i in range(length)] for length in LENGTHS]


@DTYPES
@pytest.mark.parametrize(("mode", "k"), [("all", 3), pytest.param("align", 0, marks=pytest.mark.exhaustive)])
def test_a_hybrid_model_gives_the_same_bits_handed_over_batched_and_with_drafts(
    bundled_model, dtype, mode, k
):
    assert_all_agree(bundled_model, prompts(), mode, k, dtype=dtype, batch_invariant=True)


@DTYPES
def test_so_does_a_model_of_experts_that_drafts_with_its_own_layer(tmp_path, dtype):
    model = make_checkpoint(tmp_path, MOE_WITH_MTP, seed=5)
    assert_all_agree(model, prompts(), "all", 3, drafter="mtp", dtype=dtype, batch_invariant=True)


@DTYPES
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("llama", "ngram"),  # no states
        pytest.param("qwen3-next", "mtp", marks=pytest.mark.exhaustive),  # Gated DeltaNet
        pytest.param("falcon-h1", "ngram", marks=pytest.mark.exhaustive),  # scaled projections
        pytest.param("mamba-2", "ngram", marks=pytest.mark.exhaustive),  # no keys and values
    ],
)
def test_so_do_other_families(tmp_path, family, drafter, dtype):
    model = make_family_checkpoint(tmp_path, family)
    assert_all_agree(model, prompts(), "all", 2, drafter=drafter, dtype=dtype, batch_invariant=True)


@pytest.mark.exhaustive
def test_several_ranks_add_up_in_an_order_that_no_batch_changes(tmp_path):
    model = make_checkpoint(tmp_path, replace(DENSE, n_groups=4), seed=5)
    settings = {"max_num_seqs": 5, "max_batch_tokens": 160, "batch_invariant": True}
    with lead_engine(model, 4, **settings) as engine:
        assert all_at_once(engine, prompts()) == one_by_one(engine, prompts())


def test_on_a_gpu_no_layer_multiplies_by_another_product(tmp_path, monkeypatch):
    """The layers are built on a device without memory, since the weights of a CPU would be packed."""
    model = make_checkpoint(tmp_path, MOE_WITH_MTP, seed=5)
    config = read_config(model, "bfloat16")
    monkeypatch.setattr(linear, "invariant_linear", lambda x, w, bias: x.new_empty(len(x), len(w)))
    monkeypatch.setattr(linear, "F", None)  # whoever asks for torch's product fails
    weights = MadeWeights(model, config, "meta", NoValues(), batch_invariant=True)
    built = build_model(config, weights, mtp=True)
    hidden = torch.empty(3, config.hidden_size, dtype=torch.bfloat16, device="meta")
    assert built.logits(hidden).shape == (3, config.vocab_size)
    mixers = [mixer for block in built.layers.blocks for mixer in block.mixers]
    switched = [mixer for mixer in mixers if isinstance(mixer, Attention)]
    switched += [mixer.experts for mixer in mixers if isinstance(mixer, Moe)]
    assert len(switched) == 3
    assert all(part.batch_invariant for part in switched)


def test_on_a_simulated_gpu_no_step_waits_for_the_device(tmp_path):
    """In float32, torch's own grouped product would wait."""
    model = make_checkpoint(tmp_path, MOE_WITH_MTP, seed=5)
    more = (("batch_invariant", True), ("max_batch_tokens", 128))
    simulated = Simulated.make(Setting("moe", 1, "mtp", "align", more), model)
    assert simulated.differences(all_kinds_of_asks(1, seed=1)) == []
    assert simulated.gpu.waits == {}


def test_ranks_that_share_a_group_of_a_norm_are_refused(bundled_model):
    config = read_config(bundled_model)
    groups = config.mamba.norm_groups
    weights = MadeWeights(bundled_model, config, "meta", NoValues(), batch_invariant=True)
    with pytest.raises(ConfigError, match=f"spreads the {groups} groups of a norm over ranks.*choose"):
        build_model(config, weights, tp=TensorParallel(0, 2 * groups))


def test_without_the_setting_tokens_of_a_bfloat16_model_differ_only_where_logits_tie(tmp_path):
    """Torch's products and those of the batch-invariant model add up in different orders."""
    model = make_checkpoint(tmp_path, DENSE, seed=5)
    few = prompts()[:3]
    settings = {"dtype": "bfloat16", "max_batch_tokens": 160, "max_num_seqs": 5}
    answers = tokens_of(all_at_once(make_engine(model, "both", **settings), few))
    reference = load_model(model, dtype="bfloat16", batch_invariant=True)
    ties, tie = 0, tie_of(torch.bfloat16, len(reference.config.layer_types))
    for prompt, answer in zip(few, answers, strict=True):
        sequence = Sequence(0, [*prompt, *answer[:-1]])
        (logits,) = Driver(reference, 1).step([(sequence, len(sequence.token_ids))])
        ties += count_ties(len(prompt), answer, logits, tie=tie)
    assert ties <= max(1, MAX_TIES_BFLOAT16 * sum(map(len, answers)))


@pytest.mark.parametrize(
    ("ssm_dtype", "has_state", "batch_invariant", "cuts"),
    [
        (torch.float32, True, False, None),
        (torch.float32, True, True, ExactCuts(64)),  # a scan's chunks begin at multiples of 64
        (torch.float32, False, True, ExactCuts(1)),  # token N is a decode row everywhere
        (torch.bfloat16, True, True, ExactCuts(64)),
    ],
)
def test_prompts_are_cut_where_every_server_cuts_them(ssm_dtype, has_state, batch_invariant, cuts):
    made = ExactCuts.of(torch.float32, ssm_dtype, has_state=has_state, batch_invariant=batch_invariant)
    assert made == cuts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_block_size": 48}, "states of a `batch_invariant` engine, are kept only at common multiples"),
        ({"max_batch_tokens": 66, "max_num_seqs": 3}, "`max_batch_tokens` 66 is below 67: it must hold 3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(bundled_model, settings, message):
    config = EngineConfig(bundled_model, "both", batch_invariant=True, **settings)
    with pytest.raises(ConfigError, match=message):
        config.demand(read_config(bundled_model))


def test_a_server_with_the_setting_does_not_take_the_states_of_one_without(bundled_model):
    invariant, other = (
        make_engine(bundled_model, "both", max_batch_tokens=128, batch_invariant=is_on)
        for is_on in (True, False)
    )
    assert invariant.fingerprint != other.fingerprint
