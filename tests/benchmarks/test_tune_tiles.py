import pytest

tune_tiles = pytest.importorskip("benchmarks.gpu.tune_tiles", reason="needs Triton", exc_type=ImportError)


def test_the_search_keeps_what_is_faster_and_passes_over_what_fails():
    times = {(16, 4): 1.0, (32, 4): None, (8, 4): 0.8, (8, 8): 0.9, (8, 2): 0.7}

    def ratio(candidate, best):
        ours, others = (times[tiles["BLOCK_P"], tiles["num_warps"]] for tiles in (candidate, best))
        return None if ours is None else ours / others

    default = {"BLOCK_P": 16, "num_warps": 4}
    values = {"BLOCK_P": (32, 16, 8), "num_warps": (8, 4, 2)}
    assert tune_tiles.descend(default, values, ratio) == {"BLOCK_P": 8, "num_warps": 2}
    assert tune_tiles.descend(default, values, lambda *_: None) == default
    assert default == {"BLOCK_P": 16, "num_warps": 4}


def test_a_run_goes_on_behind_the_shapes_that_an_earlier_one_wrote(tmp_path):
    plan = list(tune_tiles.tunings(tune_tiles.MODELS["8b"]()))
    first, second, *rest = plan
    entries = {
        one.request.op: {one.request.shape: {"tiles": one.request.default}} for one in (first, rest[-1])
    }
    tune_tiles.TileTable("NVIDIA X", entries).write(tmp_path)
    table = tune_tiles.TileTable("NVIDIA X", {second.request.op: {second.request.shape: {"tiles": {}}}})
    tune_tiles.resume(table, tmp_path)
    assert tune_tiles.missing(plan, table) == rest[:-1]
    tune_tiles.resume(table, tmp_path / "nothing")
    assert tune_tiles.missing(plan, table) == rest[:-1]


def test_what_is_tried_are_tiles_that_the_kernels_have():
    tunings = list(tune_tiles.tunings(tune_tiles.MODELS["8b"]()))
    assert len({(tuning.request.op, tuning.request.shape) for tuning in tunings}) == len(tunings)
    for tuning in tunings:
        assert tuning.values.keys() == tuning.request.default.keys()
        assert {case.op for case in tuning.cases} == {tuning.request.op}
        for name, value in tuning.request.default.items():
            assert value in tuning.values[name]
