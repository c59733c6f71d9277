"""Files are asked for before they are needed."""

from __future__ import annotations

import pytest

from twinfang.commands.read_ahead import PIECE, read_ahead


def test_reading_ahead_ends_by_itself_whatever_the_directory_holds(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(bytes(3 * PIECE + 1))
    (tmp_path / "b.safetensors").mkdir()  # can't be read
    (tmp_path / "c.safetensors").write_bytes(b"")
    thread = read_ahead(tmp_path)
    if thread is None:
        pytest.skip("this system can't be asked to read ahead")
    thread.join(10.0)
    assert not thread.is_alive()
