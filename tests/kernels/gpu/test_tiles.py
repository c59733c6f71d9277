import json

import pytest
import torch

from kernels.gpu import tiles as module
from kernels.gpu.tiles import TileRequest, TileTable, choose, file_name, table_of

REQUEST = TileRequest.of("some_op", {"BLOCK_P": 16, "num_warps": 4}, dtype=torch.bfloat16, head_dim=64)
TUNED = {"BLOCK_P": 32, "num_warps": 8}
ENTRY = {"tiles": TUNED, "microseconds": 2.5, "default_microseconds": 3.0}
DEVICE = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    table_of.cache_clear()
    yield tmp_path
    table_of.cache_clear()


def table_with(entry):
    return TileTable(DEVICE, {"some_op": {REQUEST.shape: entry}}, {"torch": "2.11.0"})


def test_a_request_names_its_shape():
    assert REQUEST.shape == "dtype=bfloat16 head_dim=64"


def test_a_table_that_was_written_is_found_by_the_device_name(directory):
    path = table_with(ENTRY).write(directory)
    assert path.name == "NVIDIA_H100_80GB_HBM3.json"
    assert table_of(DEVICE).tiles(REQUEST) == TUNED
    assert [p.name for p in directory.iterdir()] == [path.name]


def test_other_devices_shapes_and_ops_get_the_default(directory):
    table_with(ENTRY).write(directory)
    assert table_of("NVIDIA H200").tiles(REQUEST) == REQUEST.default
    other_shape = TileRequest.of("some_op", REQUEST.default, dtype=torch.float32, head_dim=64)
    other_op = TileRequest("other_op", REQUEST.shape, REQUEST.default)
    assert table_of(DEVICE).tiles(other_shape) == REQUEST.default
    assert table_of(DEVICE).tiles(other_op) == REQUEST.default
    assert choose(REQUEST, torch.device("cpu")) == REQUEST.default


@pytest.mark.parametrize(
    "tiles",
    [{"BLOCK_P": 16}, {**TUNED, "BLOCK_Q": 16}, {"BLOCK_N": 16, "num_warps": 4}],
)
def test_tiles_that_the_kernel_does_not_have_are_refused(tiles):
    with pytest.raises(ValueError, match="tune again"):
        table_with({**ENTRY, "tiles": tiles}).tiles(REQUEST)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"device": DEVICE, "made_with": {}, "ops": []}),
        json.dumps({"device": DEVICE, "made_with": {}, "ops": {"some_op": {"shape": {"BLOCK_P": 16}}}}),
        *(
            json.dumps({"device": DEVICE, "made_with": {}, "ops": {"some_op": {"shape": {"tiles": tiles}}}})
            for tiles in (
                {"BLOCK_P": 24},
                {"num_warps": 0},
                {"BLOCK_P": "16"},
                {"num_warps": 4.0},
                {"BLOCK_P": True},
            )
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(directory, content):
    path = directory / file_name(DEVICE)
    path.write_text(content)
    with pytest.raises(ValueError, match="NVIDIA_H100_80GB_HBM3"):
        table_of(DEVICE)


def test_a_table_under_another_devices_name_is_refused(directory):
    table_with(ENTRY).write(directory).rename(directory / "NVIDIA_H200.json")
    with pytest.raises(ValueError, match="is called NVIDIA_H100_80GB_HBM3"):
        table_of("NVIDIA H200")


def test_the_committed_tables_can_be_read():
    for path in module.DIRECTORY.glob("*.json"):
        assert TileTable.read(path).entries
