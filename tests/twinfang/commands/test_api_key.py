"""``twinfang api-key`` writes lines that routers read."""

from router.access.key_file import read_keys
from router.access.key_limits import KeyLimits
from testing.command_lines import BY_NAME, parsed
from twinfang.commands.api_key import prepare


def test_a_key_is_added_with_its_limits(tmp_path, capsys):
    path = tmp_path / "keys"
    limits = ("--requests-per-minute", "60", "--tokens-per-day", "100000")
    for flags in (limits, ("--min-priority", "3")):
        prepare(parsed(BY_NAME["api-key"], "--key-name", "alice", "--api-keys-file", str(path), *flags))()
    first, second = (read_keys(path).find(key) for key in capsys.readouterr().out.split())
    assert first.limits == KeyLimits(requests_per_minute=60, tokens_per_day=100_000)
    assert (second.name, second.limits, second.min_priority) == ("alice", None, 3)
