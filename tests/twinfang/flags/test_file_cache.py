"""The flags of files for cached prompts, and the settings that they give."""

import argparse
from pathlib import Path

import pytest

from engine.files.tier_settings import FileCache
from twinfang.flags.file_cache import FILE_CACHE, file_cache
from twinfang.flags.flag import FlagGroup, add_flags, resolve
from wire.errors import ConfigError


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    groups = [FlagGroup("files", FILE_CACHE)]
    add_flags(parser, groups)
    return file_cache(resolve(groups, parser.parse_args(arguments), {}))


def test_the_flags_become_settings(tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32)
    assert parsed() is None
    small = parsed("--file-cache-dir", "/cache", "--file-cache-size", "512M")
    assert small == FileCache(Path("/cache"), 1 << 29)
    more = ("--file-cache-max-age", "24", "--file-cache-wait", "0.2", "--file-cache-key-file", str(key_file))
    assert parsed("--file-cache-dir", "/cache", "--file-cache-size", "2", *more) == FileCache(
        Path("/cache"), 2 << 30, max_age_s=86400.0, wait_s=0.2, key_file=key_file
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--file-cache-size", "2"), "--file-cache-size needs --file-cache-dir"),
        (("--file-cache-max-age", "2"), "--file-cache-max-age needs --file-cache-dir"),
        (("--file-cache-dir", "/cache"), "`file_cache_dir` /cache needs a size"),
        (("--file-cache-dir", "/etc/passwd"), "--file-cache-dir '/etc/passwd': expected a directory"),
        (("--file-cache-key-file", "/nowhere/key"), "there is no such file"),
    ],
)
def test_flags_that_lack_another_one_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parsed(*arguments)
