"""Compiled kernels of an installation get into caches that lack them."""

from __future__ import annotations

from twinfang.commands.kernel_seed import seed_caches


def test_caches_get_what_they_lack_and_keep_what_they_have(tmp_path):
    seed, caches = tmp_path / "seed", tmp_path / "caches"
    for name in ("numba/kernels_1/scan.nbc", "numba/kernels_1/scan.nbi", "triton/AB/cuda_utils.so"):
        (seed / name).parent.mkdir(parents=True, exist_ok=True)
        (seed / name).write_text("from the image")
    newer = caches / "numba" / "kernels_1" / "scan.nbi"
    newer.parent.mkdir(parents=True)
    newer.write_text("from this machine")
    seed_caches(seed, {"NUMBA_CACHE_DIR": str(caches / "numba"), "TRITON_CACHE_DIR": ""})
    found = {str(path.relative_to(caches)): path.read_text() for path in caches.rglob("*") if path.is_file()}
    assert found == {
        "numba/kernels_1/scan.nbc": "from the image",
        "numba/kernels_1/scan.nbi": "from this machine",
    }


def test_an_installation_without_compiled_kernels_changes_nothing(tmp_path):
    cache = tmp_path / "numba"
    seed_caches(tmp_path / "none", {"NUMBA_CACHE_DIR": str(cache)})
    assert not cache.exists()


def test_a_cache_that_can_t_be_written_is_logged_and_no_error(tmp_path, caplog):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "scan.nbc").touch()
    (tmp_path / "file").touch()
    seed_caches(tmp_path, {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "numba")})
    (line,) = caplog.messages
    assert line.startswith(f"NUMBA_CACHE_DIR {tmp_path}/file/numba: compiled kernels can't be copied there")
