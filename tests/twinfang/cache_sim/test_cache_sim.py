"""``twinfang cache-sim``: logs, replays and what it says."""

import json

import pytest

from benchmarks.caches import eviction_grid
from benchmarks.caches.traces import BLOCK_TOKENS, KINDS, generate
from engine.cost.step_cost import PrefillCost
from engine.memory.start_sizes import StartSizes
from twinfang.cache_sim import flags
from twinfang.cache_sim.contenders import CONTENDERS, Question
from twinfang.cache_sim.replay import Hardware
from twinfang.cache_sim.trace import TracedRequest, read_trace, write_trace
from twinfang.cli import main
from wire.errors import ConfigError

SIZES = StartSizes(BLOCK_TOKENS, 1000, 20_000, 1e9, 1e4)
HARDWARE = Hardware(PrefillCost(0.001, 1e-5, 1e-10), 2048)


def question(kind, seed=1, num_requests=150):
    return Question(generate(kind, seed, num_requests), SIZES, HARDWARE, 4)


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_a_generated_log_follows_from_its_seed(kind):
    first, again, other = generate(kind, 1, 60), generate(kind, 1, 60), generate(kind, 2, 60)
    assert first == again != other
    assert [one.arrival_s for one in first] == sorted(one.arrival_s for one in first)
    for one in first:
        assert len(one.ids) == (one.num_prompt + one.num_answer) // BLOCK_TOKENS
        assert len(set(one.ids)) == len(one.ids)


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_equal_ids_have_equal_ids_before_them(kind):
    before = {}
    for request in generate(kind, 3, 100):
        for parent, one in zip((None, *request.ids), request.ids, strict=False):
            assert before.setdefault(one, parent) == parent


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_with_endless_memory_all_but_first_uses_hit(name):
    """Two requests with one prompt: the second computes what does not end at a block."""
    ids = tuple(range(10))
    requests = [TracedRequest(float(n), 10 * BLOCK_TOKENS + 1, 5, ids) for n in range(2)]
    outcome = CONTENDERS[name](Question(requests, SIZES, HARDWARE, 4), 1 << 30)
    assert outcome.num_hit == 10 * BLOCK_TOKENS
    assert outcome.ttfts_s[1] < outcome.ttfts_s[0]


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_a_prompt_larger_than_the_budget_is_computed_without_the_cache(name):
    requests = [TracedRequest(0.0, 100 * BLOCK_TOKENS, 5, tuple(range(100)))] * 2
    outcome = CONTENDERS[name](Question(requests, SIZES, HARDWARE, 4), 50_000)
    assert (outcome.num_hit, outcome.num_uncached) == (0, 2)


def test_a_prompt_that_comes_again_takes_no_more_memory():
    """It ends with a full block, which is cached, but from which no request can start."""
    requests = [TracedRequest(float(n), 10 * BLOCK_TOKENS, 5, tuple(range(10))) for n in range(50)]
    budget = 10 * SIZES.block_bytes + 2 * SIZES.slot_bytes
    outcome = CONTENDERS["value"](Question(requests, SIZES, HARDWARE, 4), budget)
    assert outcome.num_uncached == 0
    assert outcome.num_hit == 49 * 8 * BLOCK_TOKENS  # states are 4 blocks apart


def test_a_log_with_blocks_of_another_size_is_refused(tmp_path):
    write_trace(generate("chats", 1, 5), tmp_path / "log.jsonl")
    for other in (BLOCK_TOKENS // 2, BLOCK_TOKENS * 8):
        with pytest.raises(ConfigError, match=f"don't fit blocks of {other} tokens.*--trace-block"):
            read_trace(tmp_path / "log.jsonl", other)


def test_a_budget_in_which_nothing_hits_does_not_pay(tmp_path, capsys):
    write_trace(generate("chats", 1, 20), tmp_path / "log.jsonl")
    given = ["cache-sim", str(tmp_path / "log.jsonl"), "--trace-block", str(BLOCK_TOKENS), "--cache", "lru"]
    assert main([*given, "--budget", "0.000001", "--budget", "0.000002"]) == 0
    assert "saves anything; try larger ones with --budget" in capsys.readouterr().out


def test_a_replay_depends_on_nothing_but_the_log():
    first, again = (CONTENDERS["value+placement"](question("agents"), 3_000_000) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("kind", ["chats", "agents"])
def test_value_saves_more_than_lru_and_the_future_more_than_both(kind):
    asked = question(kind, 7, 200)
    budget = asked.footprint_bytes // 10
    saved = {name: CONTENDERS[name](asked, budget).saved_share for name in CONTENDERS}
    assert saved["lru"] < saved["value+placement"] < saved["clairvoyant"]


def test_a_shorter_mean_is_not_paid_for_by_the_slowest_requests():
    """Long contexts that grow by little at a time: before, their slowest requests took a third longer than
    with Marconi's policy. The log is long enough to learn from."""
    asked = eviction_grid.question("8b", generate("agents", 401, 1500), BLOCK_TOKENS)
    ours, other = (
        CONTENDERS[name](asked, asked.footprint_bytes // 10) for name in ("value+placement", "marconi")
    )
    assert ours.mean_ttft_s < other.mean_ttft_s
    assert ours.p95_ttft_s < other.p95_ttft_s


def test_a_written_log_is_read_as_it_was(tmp_path):
    requests = generate("chats", 1, 50)
    write_trace(requests, tmp_path / "log.jsonl")
    read = read_trace(tmp_path / "log.jsonl", BLOCK_TOKENS)
    assert [(one.num_prompt, one.num_answer, len(one.ids)) for one in read] == [
        (one.num_prompt, one.num_answer, len(one.ids)) for one in requests
    ]


def test_the_mooncake_format_is_read(tmp_path):
    """The last id is of a block that is not full; answers have no ids."""
    line = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, "x", 48]}
    (tmp_path / "log").write_text(json.dumps(line) + "\n\n")
    [request] = read_trace(tmp_path / "log", 512)
    assert (request.arrival_s, request.num_prompt, len(request.ids)) == (27.482, 1100, 2)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"input_length": 0, "output_length": 1, "hash_ids": []}',
        '{"input_length": 1, "output_length": -1, "hash_ids": []}',
        '{"input_length": 1e3, "output_length": 1, "hash_ids": []}',
        '{"input_length": 10, "output_length": 1, "hash_ids": "abc"}',
        '{"input_length": 10, "output_length": 1, "hash_ids": [1.5]}',
        '{"timestamp": NaN, "input_length": 10, "output_length": 1, "hash_ids": [1]}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    (tmp_path / "log").write_text("\n" + line + "\n", encoding="latin-1")
    with pytest.raises(ConfigError, match=r"log, line 2: .*expected an object with timestamp"):
        read_trace(tmp_path / "log", 512)


def test_the_flag_names_all_caches():
    assert tuple(CONTENDERS) == flags.NAMES


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    write_trace(generate("chats", 1, 60), tmp_path / "log.jsonl")
    given = [
        "cache-sim",
        str(tmp_path / "log.jsonl"),
        "--trace-block",
        str(BLOCK_TOKENS),
        "--budget",
        "0.002",
    ]
    assert main([*given, "--cache", "lru", "--cache", "value+placement"]) == 0
    assert "value+placement" in capsys.readouterr().out
    assert main([*given, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["cache"] for cell in cells] == list(CONTENDERS)
    assert all(0 <= cell["hit_rate"] <= 1 for cell in cells)


def test_a_missing_log_is_asked_for(capsys):
    assert main(["cache-sim"]) == 2
    assert "twinfang cache-sim TRACE" in capsys.readouterr().err
