"""Files of two tensor-parallel ranks: the same tokens after a restart. What one rank lacks is a miss on both.

Rank 1 runs in a process of its own, and has a folder of its own.
"""

import os
import resource
import shutil
import signal
from itertools import count
from multiprocessing import get_context

import pytest

from engine.files.tier_settings import FileCache
from testing.conditions import wait_until
from testing.kv_transfer.filing import BLOCK, NUM_TOKENS, answers, conversations, filing, num_cached
from wire.messages.ranks import RankFileNews, RunStep

WAIT_S = 30.0
TWO = {"tensor_parallel": 2}


def settings(directory, num_bytes=64 << 20, **more):
    return FileCache(directory, num_bytes, **{"wait_s": WAIT_S, **more})


def folders(directory, form):
    """The folders of rank 0, which has starts of this form, and of rank 1."""
    paths = [path for path in directory.iterdir() if path.is_dir()]
    return sorted(paths, key=lambda path: form.layout[:12] not in path.name)


def segments(folder):
    return sorted(folder.glob("*.segment"))


def fill(model_dir, files, prompts, **more):
    """Run prompts until all that host memory has is in files. Returns the answers, and the form of rank 0."""
    with filing(model_dir, files, **TWO, **more) as one:
        expected = answers(one.run(prompts))
        one.settle()
        assert one.figures.written > 3
        assert not any(one.figures.all_failures().values()), one.figures
        assert one.figures.total("written_bytes") > one.figures.written_bytes
        assert one.figures.incomplete == 0
        one.check_ranks_agree()
        return expected, one.store._form


def plain_answers(model_dir, prompts, **more):
    """The answers of one rank without a cache."""
    with filing(model_dir, None, **{**more, "cache_mode": "none"}) as plain:
        return answers(plain.run(prompts))


def check_nothing_is_owned(one):
    owned = one.own.scheduler.owned
    assert owned.cache.num_available_blocks == owned.blocks.capacity
    assert owned.cache.num_available_slots == owned.slots.capacity
    assert not any(start.is_pinned for start in owned.cache.tier._starts)
    assert (owned.files.writing, owned.files.fetches) == (None, {})
    assert one.files._own_ended == {}
    assert one.files._ends._ended == {}


def check_restart(model_dir, files, prompts, **more):
    expected = plain_answers(model_dir, prompts, **more)
    assert fill(model_dir, files, prompts, **more)[0] == expected
    with filing(model_dir, files, **TWO, **more) as again:
        found = again.run(prompts)
        assert answers(found) == expected
        assert again.figures.read > 3
        assert again.figures.total("read_bytes") > again.figures.read_bytes
        assert num_cached(found) > 10 * BLOCK
        assert not any(again.figures.all_failures().values()), again.figures
        again.settle()
        again.check_ranks_agree()
        check_nothing_is_owned(again)


def test_two_ranks_that_start_again_find_what_both_have(bundled_model, tmp_path):
    """Rank 1 has lost one segment. And no message speaks of files when nothing happens to them."""
    prompts, files = conversations(8, 1), settings(tmp_path, num_bytes=4 << 20)
    expected, form = fill(bundled_model, files, prompts)
    own, other = folders(tmp_path, form)
    assert len(segments(own)) == len(segments(other)) > 4
    segments(other)[0].unlink()
    with filing(bundled_model, files, **TWO) as again:
        num_written = len(segments(own))
        assert again.figures.incomplete == 1
        found = again.run(prompts)
        assert answers(found) == expected
        assert again.figures.read == num_written - 1
        assert again.figures.total("read_bytes") == 2 * again.figures.read_bytes
        assert not any(again.figures.all_failures().values()), again.figures
        again.settle()
        again.check_ranks_agree()
        check_nothing_is_owned(again)
        check_nothing_is_told(again)


def check_nothing_is_told(one):
    """While an answer is generated, neither rank 0's nor rank 1's messages speak of files."""
    told, reports = [], []
    tell, take = one.ranks.tell, one.files._take
    one.engine._tell = lambda call: (told.append(call), tell(call))
    one.ranks.listen(lambda rank, news: (reports.append(news), take(rank, news)), RankFileNews)
    one.run([[5, 6, 7]])
    steps = [call for call in told if isinstance(call, RunStep)]
    assert len(steps) >= NUM_TOKENS
    assert [call.files for call in steps if call.files is not None] == []
    assert reports == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["all", "align"])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("formats", [{}, {"kv_cache_dtype": "fp8"}])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_tokens_with_every_mode_format_and_drafts(bundled_model, tmp_path, mode, k, formats, is_encrypted):
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32)
    files = settings(tmp_path / "files", key_file=key_file if is_encrypted else None)
    more = {"num_speculative": k, "drafter": "ngram" if k else None, "cache_mode": mode, **formats}
    check_restart(bundled_model, files, conversations(6, 3, seed=k), **more)


@pytest.fixture(scope="module")
def filled(bundled_model, tmp_path_factory):
    """A directory with files of two ranks, prompts, answers and rank 0's form. Tests work with copies."""
    directory = tmp_path_factory.mktemp("filled")
    prompts = conversations(8, 1, seed=6)
    return directory, prompts, *fill(bundled_model, settings(directory), prompts)


def remove(folder):
    shutil.rmtree(folder)


def flip(folder):
    for path in segments(folder):
        data = bytearray(path.read_bytes())
        for place in range(3000, len(data), 20_000):
            data[place] ^= 0x10
        path.write_bytes(data)


def truncate(folder):
    for path in segments(folder):
        os.truncate(path, int(path.stat().st_size * 0.4))


def check_damaged(model_dir, directory, prompts, expected, *, is_all_lost):
    """Tokens are right, what one rank lacks is a miss on both, and later it is written again."""
    with filing(model_dir, settings(directory), **TWO) as one:
        assert (one.figures.incomplete > 3) == is_all_lost or any(one.figures.all_failures().values())
        found = one.run(prompts)
        assert answers(found) == expected
        assert not is_all_lost or num_cached(found) == one.figures.read == 0
        one.settle()
        one.check_ranks_agree()
        check_nothing_is_owned(one)
        figures = one.figures
    with filing(model_dir, settings(directory), **TWO) as again:
        found = again.run(prompts)
        assert answers(found) == expected
        assert again.figures.read > 0
        assert num_cached(found) > 0
        again.check_ranks_agree()
    return figures


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", [remove, flip, truncate])
def test_what_one_rank_has_lost_is_a_miss_on_both(bundled_model, tmp_path, filled, rank, damage):
    directory, prompts, expected, form = filled
    copy = shutil.copytree(directory, tmp_path / "copy")
    damage(folders(copy, form)[rank])
    figures = check_damaged(bundled_model, copy, prompts, expected, is_all_lost=damage is remove)
    kinds = {kind for kind, number in figures.all_failures().items() if number}
    assert kinds <= {"damaged", "torn", "gone"}
    assert bool(kinds) == (damage is not remove)


@pytest.mark.exhaustive
def test_shares_of_different_writes_are_not_mixed(bundled_model, tmp_path, filled):
    """The same prompts were written twice. Rank 0 has what the first write has left, rank 1 the second."""
    directory, prompts, expected, form = filled
    fill(bundled_model, settings(tmp_path / "second"), prompts)
    copy = shutil.copytree(directory, tmp_path / "copy")
    own = folders(copy, form)[1]
    shutil.rmtree(own)
    shutil.copytree(folders(tmp_path / "second", form)[1], own)
    with filing(bundled_model, settings(copy), **TWO) as one:
        assert one.figures.incomplete > 6
        found = one.run(prompts)
        assert answers(found) == expected
        assert (num_cached(found), one.figures.read) == (0, 0)
        one.check_ranks_agree()


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_an_older_backup_has_what_was_there_then(bundled_model, tmp_path, rank):
    first, later = conversations(8, 1, seed=7), conversations(8, 1, seed=8)
    files = settings(tmp_path / "files")
    expected, form = fill(bundled_model, files, first)
    backup = shutil.copytree(folders(files.directory, form)[rank], tmp_path / "backup")
    expected += fill(bundled_model, files, later)[0]
    own = folders(files.directory, form)[rank]
    shutil.rmtree(own)
    shutil.copytree(backup, own)
    with filing(bundled_model, files, **TWO) as one:
        assert one.figures.incomplete > 3
        found = one.run(later)
        assert (num_cached(found), one.figures.read) == (0, 0)
        found = [*one.run(first), *found]
        assert one.figures.read > 3
        assert answers(found) == expected
        one.check_ranks_agree()


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_is_removed_while_the_server_runs_is_forgotten(bundled_model, tmp_path, filled, rank):
    directory, prompts, expected, form = filled
    copy = shutil.copytree(directory, tmp_path / "copy")
    with filing(bundled_model, settings(copy), **TWO) as one:
        shutil.rmtree(folders(copy, form)[rank])
        found = one.run(prompts)
        assert answers(found) == expected
        assert (num_cached(found), one.figures.all_failures()["gone"] > 0) == (0, True)
        one.settle()
        one.check_ranks_agree()
        check_nothing_is_owned(one)
        assert one.figures.written > 0


@pytest.mark.exhaustive
def test_a_full_disk_of_one_rank_stops_the_writes_of_both(bundled_model, tmp_path):
    prompts = conversations(8, 1, seed=9)
    with filing(bundled_model, settings(tmp_path), **TWO) as one:
        _, hard = resource.prlimit(one.ranks.pids[0], resource.RLIMIT_FSIZE)
        resource.prlimit(one.ranks.pids[0], resource.RLIMIT_FSIZE, (40_000, hard))
        found = one.run(prompts)
        again = one.run(prompts)
        assert answers(again) == answers(found)
        assert num_cached(again) > 0
        assert one.figures.failures["full"] == 0
        assert one.figures.all_failures()["full"] > 0
        assert one.store.pauses_s[1] > 0
        assert one.figures.written <= 2
        one.check_ranks_agree()


def fill_forever(model_dir, files):
    """Run other prompts after other prompts, in processes of their own."""
    with filing(model_dir, files, **TWO) as one:
        for seed in count():
            one.run(conversations(8, 1, seed=seed))
            one.settle()


def size_of(directory):
    return sum(path.stat().st_size for path in directory.glob("*/*.segment"))


@pytest.mark.exhaustive
def test_a_server_that_is_killed_while_it_writes_leaves_nothing_wrong(bundled_model, tmp_path):
    """It is killed twice, when the files have grown. Its other rank ends by itself, and folders are found."""
    files = settings(tmp_path)
    expected = [plain_answers(bundled_model, conversations(8, 1, seed=seed)) for seed in range(3)]
    num_bytes = 0
    for _ in range(2):
        process = get_context("spawn").Process(target=fill_forever, args=(bundled_model, files))
        process.start()
        wait_until(lambda least=num_bytes: size_of(tmp_path) > least + 1_500_000, "it writes", 60)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        num_bytes = size_of(tmp_path)
    with filing(bundled_model, files, **TWO) as again:
        assert len(list(tmp_path.iterdir())) == 2
        assert {kind for kind, number in again.figures.all_failures().items() if number} <= {"torn"}
        for seed in range(3):
            found = again.run(conversations(8, 1, seed=seed))
            assert answers(found) == expected[seed]
            assert num_cached(found) > 0
        assert {kind for kind, number in again.figures.all_failures().items() if number} <= {"torn"}
        again.settle()
        again.check_ranks_agree()
        check_nothing_is_owned(again)
