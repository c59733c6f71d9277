"""The MTP layer in plain torch, over a whole sequence at once: dense causal attention, no cache, float64.

Written only from the published formula and tensor names; transformers ignores ``mtp.*``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from testing.checkpoints.random_checkpoint import transformers_hidden


class MtpOracle:
    """One checkpoint's MTP layer; the target's hidden states come from transformers."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        tensors = load_file(model_dir / "model.safetensors")
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        self.config = json.loads((model_dir / "config.json").read_text())
        self.layer_types: list[str] = self.config["mtp_layers_block_type"]

    def drafts(self, token_ids: list[int], num_drafts: int) -> tuple[list[int], Tensor]:
        """Return the tokens that the layer drafts after ``token_ids``, and their hidden states. The target
        has computed all of ``token_ids`` except the last."""
        hidden = transformers_hidden(self.model_dir, token_ids[:-1]).double()
        next_ids = list(token_ids[1:])
        outputs = []
        for _ in range(num_drafts):
            outputs.append(self.forward(hidden, next_ids)[-1])
            next_ids.append(int((self.weights["lm_head.weight"] @ outputs[-1]).argmax()))
            hidden = torch.cat([hidden, outputs[-1][None]])
        return next_ids[-num_drafts:], torch.stack(outputs)

    def outputs(self, token_ids: list[int]) -> Tensor:
        """Return ``[n - 1, hidden]``: entry i is computed from the target's hidden state i and token i +
        1."""
        return self.forward(transformers_hidden(self.model_dir, token_ids[:-1]).double(), token_ids[1:])

    def forward(self, hidden: Tensor, next_ids: list[int]) -> Tensor:
        w, last = self.weights, len(self.layer_types) - 1
        mixers = {"full_attention": self.attention, "mlp": self.mlp, "moe": self.moe}
        embedded = self.norm(w["backbone.embeddings.weight"][next_ids], "mtp.layers.0.enorm")
        fused = torch.cat([embedded, self.norm(hidden, "mtp.layers.0.hnorm")], dim=-1)
        r = fused @ w["mtp.layers.0.eh_proj.weight"].T
        for index, layer_type in enumerate(self.layer_types):
            prefix = f"mtp.layers.{index}."
            r = r + mixers[layer_type](self.norm(r, f"{prefix}norm"), f"{prefix}mixer.")
        return self.norm(r, f"mtp.layers.{last}.final_layernorm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config["layer_norm_epsilon"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.weights[f"{name}.weight"]

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        head_dim = self.config["head_dim"]
        q, k, v = (
            (x @ self.weights[f"{prefix}{name}_proj.weight"].T).unflatten(-1, (-1, head_dim)).transpose(0, 1)
            for name in "qkv"
        )
        repeats = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        scores = q @ k.transpose(1, 2) / head_dim**0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return y.transpose(0, 1).flatten(1) @ self.weights[f"{prefix}o_proj.weight"].T

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        up, down = (self.weights[f"{prefix}{name}_proj.weight"] for name in ("up", "down"))
        return F.relu(x @ up.T).square() @ down.T

    def moe(self, x: Tensor, prefix: str) -> Tensor:
        """Compute the experts token by token and expert by expert; one group, no latent projection."""
        config = self.config
        assert config["n_group"] == 1
        assert config["moe_latent_size"] is None
        scores = (x @ self.weights[f"{prefix}gate.weight"].T).sigmoid()
        correction = self.weights[f"{prefix}gate.e_score_correction_bias"]
        y = self.mlp(x, f"{prefix}shared_experts.")
        for token, score in enumerate(scores):
            chosen = (score + correction).topk(config["num_experts_per_tok"]).indices.tolist()
            total = sum(score[expert] for expert in chosen) if config["norm_topk_prob"] else 1.0
            for expert in chosen:
                weight = config["routed_scaling_factor"] * score[expert] / total
                y[token] += weight * self.mlp(x[token], f"{prefix}experts.{expert}.")
        return y
