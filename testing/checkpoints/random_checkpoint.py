"""Random NemotronH checkpoints as real Hugging Face directories, with transformers as their oracle.

Two properties of NemotronH in transformers 5.23 that the oracle has to avoid:

* The scan clamps dt to ``time_step_min`` instead of ``time_step_limit``, and cached single-token decoding
  clamps nothing. Both fields are equal in every directory that this module writes, and the oracle sets them
  equal in any other directory that it gets.
* Cached decoding runs other code than the scan. The oracle recomputes the whole sequence without a cache:
  this is slower, but right for any dt limit.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedTokenizerFast

UNLIMITED = 1e-30
"""A lower limit of dt that softplus in float32 never reaches."""

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>")
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class CheckpointShape:
    """The shape of a random checkpoint. The defaults make a model of all four layer types."""

    pattern: str = "M*EM-*"
    vocab_size: int = 160
    hidden_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 96
    mamba_num_heads: int = 8
    mamba_head_dim: int = 16
    n_groups: int = 2
    ssm_state_size: int = 16
    conv_kernel: int = 4
    chunk_size: int = 16
    n_routed_experts: int = 8
    num_experts_per_tok: int = 3
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    moe_intermediate_size: int = 48
    moe_shared_expert_intermediate_size: int = 80
    moe_latent_size: int | None = None
    max_position_embeddings: int = 1024
    use_bias: bool = False
    mlp_bias: bool = False
    use_conv_bias: bool = True
    dt_min: float = 0.0
    mtp_pattern: str | None = None
    """Sublayers of an MTP layer; None for a checkpoint without one."""
    extra_config: dict[str, object] = field(default_factory=dict)
    """Entries that replace those that transformers wrote into ``config.json``."""


DENSE = CheckpointShape(pattern="M*M-M*")
WITH_MOE = CheckpointShape()
DENSE_WITH_MTP = replace(DENSE, mtp_pattern="*-")
MOE_WITH_MTP = replace(WITH_MOE, mtp_pattern="*E")
LATENT_MOE = CheckpointShape(
    pattern="ME*EM-", n_routed_experts=12, n_group=3, topk_group=2, num_experts_per_tok=4, moe_latent_size=32
)


def make_checkpoint(
    directory: str | Path,
    shape: CheckpointShape = WITH_MOE,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    published_names: bool = True,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes a model directory with random weights, the same for the same arguments. Returns its path.

    Weights are scaled so that a layer's output is as large as its input and logits are a few units apart:
    greedy decoding then has clear winners, and a wrong state or a swapped row shows.
    ``published_names=False`` saves transformers' own tensor names with stacked experts. A checkpoint with
    an MTP layer is always one file.
    """
    directory = Path(directory)
    generator = torch.Generator().manual_seed(seed)
    model = NemotronHForCausalLM(_transformers_config(shape)).eval()
    _randomize(model, generator)
    model.to(dtype).save_pretrained(
        directory, save_original_format=published_names, max_shard_size=max_shard_size
    )
    write_tokenizer(directory, shape.vocab_size)
    added: dict[str, object] = {"torch_dtype": str(dtype).removeprefix("torch.")}
    if shape.mtp_pattern is not None:
        path = directory / "model.safetensors"
        tensors = load_file(path) | _mtp_tensors(shape, shape.mtp_pattern, generator, dtype)
        save_file(tensors, path, metadata={"format": "pt"})
        mtp_layers = NemotronHConfig._pattern_to_list(shape.mtp_pattern)
        added |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": mtp_layers}
    _update_json(directory / "config.json", added | shape.extra_config)
    return directory


@dataclass(frozen=True)
class GreedyOracle:
    """The tokens that transformers decodes greedily, and how clear each choice was."""

    token_ids: list[int]
    gaps: list[float]
    """At each step, the best logit minus the second best, relative to the magnitude of the best."""


def transformers_greedy(
    model_dir: str | Path, prompt_ids: list[int], max_new_tokens: int, *, ignore_eos: bool = True
) -> GreedyOracle:
    """Decode greedily in float32; recompute the whole sequence at every step."""
    token_ids: list[int] = []
    gaps: list[float] = []
    for _ in range(max_new_tokens):
        logits = transformers_logits(model_dir, [*prompt_ids, *token_ids])[-1]
        best, second = logits.topk(2).values.tolist()
        token_ids.append(int(logits.argmax()))
        gaps.append((best - second) / max(abs(best), 1e-30))
        if token_ids[-1] == EOS_TOKEN_ID and not ignore_eos:
            break
    return GreedyOracle(token_ids, gaps)


@torch.inference_mode()
def transformers_logits(model_dir: str | Path, token_ids: list[int]) -> torch.Tensor:
    """Logits ``[n, vocab]`` after every token of one sequence, in float32 and without a cache.

    One call checks a whole greedy answer: row ``i`` decides token ``i + 1``.
    """
    model = _transformers_model(str(model_dir))
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


@torch.inference_mode()
def transformers_hidden(model_dir: str | Path, token_ids: list[int]) -> torch.Tensor:
    """Like :func:`transformers_logits`, but returns the hidden states ``[n, hidden]`` after the last norm."""
    model = _transformers_model(str(model_dir))
    return model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]


@lru_cache(maxsize=8)
def _transformers_model(model_dir: str) -> NemotronHForCausalLM:
    config = NemotronHConfig.from_pretrained(model_dir)
    config.time_step_min = max(config.time_step_limit[0], UNLIMITED)
    return NemotronHForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def _transformers_config(shape: CheckpointShape) -> NemotronHConfig:
    ours = ("dt_min", "mtp_pattern", "extra_config")
    fields = {name: value for name, value in vars(shape).items() if name not in ours}
    pattern = fields.pop("pattern")
    return NemotronHConfig(
        **fields,
        layers_block_type=NemotronHConfig._pattern_to_list(pattern),
        time_step_limit=(shape.dt_min, math.inf),
        time_step_min=max(shape.dt_min, UNLIMITED),
        eos_token_id=EOS_TOKEN_ID,
    )


@torch.no_grad()
def _randomize(model: NemotronHForCausalLM, generator: torch.Generator) -> None:
    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + mean)

    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        kind = name.rsplit(".", 1)[-1]
        if kind == "A_log":  # decays from almost none to almost all
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 3 - 1)
        elif kind == "dt_bias":
            normal(parameter, 1.0, mean=-2.0)
        elif kind in ("D", "bias", "e_score_correction_bias"):
            normal(parameter, 0.2)
        elif "norm" in name:
            normal(parameter, 0.2, mean=1.0)
        elif "embeddings" in name:
            normal(parameter, 1.0)
        elif "conv1d" in name:
            normal(parameter, 0.5)
        elif name.startswith("lm_head"):
            normal(parameter, 4.0 / math.sqrt(parameter.shape[-1]))
        else:  # projections: a gain of 1, or 2 where relu^2 or softmax flattens outputs
            gain = 2.0 if ("down_proj" in name or "q_proj" in name or "k_proj" in name) else 1.0
            normal(parameter, gain / math.sqrt(parameter.shape[-1]))


def _mtp_tensors(
    shape: CheckpointShape, pattern: str, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Make ``mtp.*`` as published: the layers of a model of that pattern, and the modules before and after
    them."""
    width, last = shape.hidden_size, len(pattern) - 1
    model = NemotronHForCausalLM(_transformers_config(replace(shape, pattern=pattern)))
    _randomize(model, generator)
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved, save_original_format=True)
        stored = load_file(Path(saved) / "model.safetensors")
    tensors = {
        name.replace("backbone.", "mtp."): tensor
        for name, tensor in stored.items()
        if name.startswith("backbone.layers.")
    }
    for name in ("0.enorm", "0.hnorm", f"{last}.final_layernorm"):
        tensors[f"mtp.layers.{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)
    projection = torch.randn(width, 2 * width, generator=generator) / math.sqrt(2 * width)
    tensors["mtp.layers.0.eh_proj.weight"] = projection
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer of special tokens, the printable characters, then pairs of letters until the
    vocabulary is full."""
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    pairs = [a + b for a in "etaoinshrdlu" for b in "etaoinshrdlucmf"]
    tokens = [*SPECIAL_TOKENS, *letters, *pairs]
    tokens += [f"<extra_{index}>" for index in range(max(0, vocab_size - len(tokens)))]
    vocabulary = {token: index for index, token in enumerate(tokens[:vocab_size])}
    merges = [(pair[0], pair[1]) for pair in pairs if pair in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\S+|\s"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([token for token in SPECIAL_TOKENS if token in vocabulary])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _update_json(path: Path, fields: dict[str, object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | fields, indent=2), encoding="utf-8")
