"""Pools that other processes could not open are refused (ai-dynamo/nixl 1754)."""

from __future__ import annotations

import argparse

import pytest
import torch

from kv_transfer.nixl.pool_memory import refuse_expandable_segments
from twinfang.commands.servers import prepare_decode, prepare_prefill
from twinfang.commands.table import DECODE, PREFILL
from twinfang.flags.flag import add_flags, resolve
from wire.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    "value",
    ["expandable_segments:True", "max_split_size_mb:64, expandable_segments : True,garbage_collection:0.8"],
)
def test_expandable_segments_are_refused_with_variable_value_and_remedy(name, value):
    with pytest.raises(ConfigError) as refusal:
        refuse_expandable_segments(GPU, {name: value})
    assert refusal.value.message.startswith(f"{name}={value}: ")
    assert f"take expandable_segments:True out of {name}" in refusal.value.message


@pytest.mark.parametrize(
    ("device", "environment"),
    [
        (GPU, {}),
        (GPU, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
        (GPU, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
        (GPU, {"PYTORCH_ALLOC_CONF": "expandable_segments:True,expandable_segments:False"}),
        (CPU, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ],
)
def test_other_settings_and_pools_in_host_memory_are_not(device, environment):
    refuse_expandable_segments(device, environment)


@pytest.mark.parametrize(("command", "prepare"), [(PREFILL, prepare_prefill), (DECODE, prepare_decode)])
def test_a_server_refuses_before_it_loads_its_model(monkeypatch, command, prepare):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    parser = argparse.ArgumentParser()
    add_flags(parser, command.groups)
    values = resolve(command.groups, parser.parse_args(["--device", "cuda", "--port", "0"]), {})
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        prepare(values)
