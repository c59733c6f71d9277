"""Checkpoints in llama.cpp's file format, written by its own converter.

    python -m benchmarks.side_by_side.contenders.gguf LLAMA_CPP MODEL FILE DTYPE

The converter knows tokenizers of published models by a hash and refuses others. The benchmark's prompts are
token ids, so that any of its tokenizers will do.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

LAYERS = {"linear_attention": "M", "mamba": "M", "mlp": "-", "full_attention": "*", "attention": "*"}
EXPERT_FIELDS = ("num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group", "topk_group")
"""The converter takes a model that has them for one of experts, even if none of its layers is."""
TOKENIZER = "default"


def converter_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a dense NemotronH's ``config.json`` as the converter reads it: the layers as a pattern of
    letters, without experts and MTP layers. Raises :class:`KeyError` if a layer is of another kind."""
    pattern = "".join(LAYERS[layer] for layer in config["layers_block_type"])
    left_out = {*EXPERT_FIELDS, "layers_block_type", "mtp_layers_block_type", "num_nextn_predict_layers"}
    kept = {name: value for name, value in config.items() if name not in left_out}
    return kept | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


MTP = "mtp."
"""Beginning of the names of weights that the converter does not know."""
OUT_TYPES = {"float32": "f32", "bfloat16": "bf16"}


def converted(llama_cpp: Path, model: Path, folder: Path, dtype: str) -> Path:
    """Returns the model as a file in ``folder``, with weights in ``dtype``; writes it unless it is there and
    newer than the model."""
    file = folder / dtype / f"{model.name}.gguf"
    weights = max(path.stat().st_mtime for path in model.glob("*.safetensors"))
    if not file.exists() or file.stat().st_mtime < weights:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".unfinished")
        command = [sys.executable, "-m", __spec__.name, str(llama_cpp), str(model), str(draft), dtype]
        subprocess.run(command, check=True, capture_output=True)
        os.replace(draft, file)
    return file


def main() -> None:
    llama_cpp, model, file = map(Path, sys.argv[1:4])
    out_type = OUT_TYPES[sys.argv[4]]
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: TOKENIZER
    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # its own way, through transformers, adds the defaults of fields that are left out, among them experts
    base.ModelBase.load_hparams = staticmethod(lambda *_, **__: converter_config(content))
    tensors = base.ModelBase.get_tensors
    base.ModelBase.get_tensors = lambda self: (one for one in tensors(self) if not one[0].startswith(MTP))
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outtype", out_type, "--outfile", str(file)]
    runpy.run_path(str(llama_cpp / sys.argv[0]), run_name="__main__")


if __name__ == "__main__":
    main()
