"""Values that a family's ``config.json`` may not have are refused by name, whatever their type."""

from __future__ import annotations

import json
from math import nan

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.models import read_config
from testing.checkpoints.families import CASES
from wire.errors import ModelLoadError


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("bamba", {"attn_layer_indices": [9]}, "attn_layer_indices is [9]; expected a list of layers from 0"),
        ("bamba", {"mamba_n_groups": 3}, "mamba_n_groups is 3; expected a divisor of mamba_n_heads (8)"),
        ("bamba", {"rope_parameters": {"partial_rotary_factor": nan}}, "partial_rotary_factor is nan"),
        ("granite-3", {"logits_scaling": 0}, "logits_scaling is 0; expected a number above 0"),
        ("granite-4", {"logits_scaling": 0}, "logits_scaling is 0; expected a number above 0"),
        ("granite-4", {"layer_types": [["mamba"]] * 4}, "expected a list of 4, each linear_attention or"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0; expected a number above 0"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ("mamba-2", {"expand": nan}, "expand is nan; expected a number"),
        ("qwen3-next", {"mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list of layers from 0 to 3"),
        ("qwen3.5", {"layer_types": [{}] * 4}, "expected a list of 4, each linear_attention or full_atten"),
    ],
)
def test_a_value_that_a_family_cannot_honour_is_refused_by_name(tmp_path, name, changes, named):
    config = CASES[name].config()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    content = config.to_dict() | {"architectures": [architecture]} | changes
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelLoadError) as caught:
        read_config(tmp_path)
    assert named in str(caught.value)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.config is not None])
def test_the_eps_of_norms_is_the_familys_where_the_checkpoint_has_none(tmp_path, name):
    config = CASES[name].config()
    field = "layer_norm_epsilon" if name == "mamba-2" else "rms_norm_eps"
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    content = config.to_dict() | {"architectures": [architecture], field: None}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    assert read_config(tmp_path).norm_eps == getattr(type(config)(), field)
