"""A certificate is replaced when its files change, and never by a broken one."""

import logging

import pytest

from testing.certificates import Authority
from wire.errors import ConfigError
from wire.tls.key_pair_files import KeyPairFiles
from wire.tls.key_pair_watch import KeyPairWatch

LOGGER = "wire.tls.key_pair_watch"


class Used(list):
    """All pairs that were taken into use."""


@pytest.fixture
def used() -> Used:
    return Used()


async def test_a_new_pair_is_used_once(authority, tmp_path, used):
    watch = KeyPairWatch(authority.write(tmp_path, "old"), used.append)
    await watch.look()
    assert [pair.names[1] for pair in used] == ["old"]
    authority.write(tmp_path, "new")
    for _ in range(3):
        await watch.look()
    assert [pair.names[1] for pair in used] == ["old", "new"]
    assert watch.current is used[-1]


async def test_a_link_to_another_folder_is_followed(authority, tmp_path, used):
    """Kubernetes replaces a Secret's files in this way."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        authority.write(tmp_path / name, name)
    (tmp_path / "..data").symlink_to("first")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    watch = KeyPairWatch(KeyPairFiles(tmp_path / "tls.crt", tmp_path / "tls.key"), used.append)
    (tmp_path / "..next").symlink_to("second")
    (tmp_path / "..next").replace(tmp_path / "..data")
    await watch.look()
    assert [pair.names[1] for pair in used] == ["first", "second"]


async def test_files_written_one_after_the_other_are_no_fault(authority, tmp_path, used, caplog):
    files = authority.write(tmp_path)
    watch = KeyPairWatch(files, used.append)
    key = files.private_key.read_bytes()
    authority.write(tmp_path)
    new_key = files.private_key.read_bytes()
    files.private_key.write_bytes(key)
    await watch.look()
    assert watch.current is used[0]
    files.private_key.write_bytes(new_key)
    await watch.look()
    assert watch.current is used[1]
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


@pytest.mark.parametrize("fault", ["junk", "gone", "refused"])
async def test_a_broken_pair_keeps_the_old_one_and_is_told_once(authority, tmp_path, used, caplog, fault):
    files = authority.write(tmp_path)
    is_refused = False

    def use(pair) -> None:
        if is_refused:
            raise ConfigError("OpenSSL refuses it")
        used.append(pair)

    watch = KeyPairWatch(files, use)
    authority.write(tmp_path, "new")
    right = files.certificate.read_bytes()
    if fault == "junk":
        files.certificate.write_bytes(b"junk")
    elif fault == "gone":
        files.certificate.unlink()
    else:
        is_refused = True
    for _ in range(5):
        await watch.look()
    assert watch.current is used[0]
    assert len(used) == 1
    (told,) = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert told.getMessage().startswith("the certificate in use stays, until ")
    is_refused = False
    files.certificate.write_bytes(right)
    await watch.look()
    assert watch.current.names[1] == "new"


def test_a_broken_pair_at_the_start_is_an_error(tmp_path, used):
    files = Authority().write(tmp_path)
    files.private_key.write_bytes(b"junk")
    with pytest.raises(ConfigError, match="private key"):
        KeyPairWatch(files, used.append)
    assert not used
