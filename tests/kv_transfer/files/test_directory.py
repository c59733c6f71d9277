"""A server's folder stays its own, also after somebody has deleted it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.files.start_files import StartForm
from kv_transfer.files.directory import Directory

FORM = StartForm("model", "layout", 1, 1)
LOCKS = (
    "import sys; from pathlib import Path; from kv_transfer.files.directory import Directory; "
    "print(Directory.lock(Path(sys.argv[1])) is not None, flush=True); sys.stdin.read()"
)


def other_process(path: Path) -> subprocess.Popen[str]:
    """Starts a process that tries to lock the folder, says whether it could, and ends when stdin does."""
    command = [sys.executable, "-c", LOCKS, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_deleted_folder_is_made_and_locked_again(tmp_path: Path) -> None:
    directory = Directory.take(tmp_path / "files", FORM)
    shutil.rmtree(tmp_path / "files")
    path, fd = directory.create()
    os.close(fd)
    assert [path] == list(directory.segments())
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    assert directory.path.stat().st_mode & 0o777 == 0o700
    with other_process(directory.path) as other:
        assert said(other) == "False"
        other.communicate()
    directory.close()


def test_a_folder_that_another_server_has_taken_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    directory = Directory.take(tmp_path, FORM)
    shutil.rmtree(directory.path)
    directory.path.mkdir()
    with other_process(directory.path) as other:
        assert said(other) == "True"
        with pytest.raises(OSError, match="another server has taken the folder"):
            directory.create()
        other.communicate()
    path, fd = directory.create()
    os.close(fd)
    assert path.exists()
    directory.close()
