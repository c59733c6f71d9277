"""Prompts of one key are gone from device, host memory and files, also after a crash, and no others are."""

import os
import shutil
import threading
import time

import pytest

from engine.files.start_files import PurgedFiles
from engine.files.tier_settings import FileCache
from engine.request import Request
from kv_transfer.files import file_store, write_pace
from kv_transfer.files.offline_purge import folders, purge_folder
from kv_transfer.files.purge import Purge
from kv_transfer.files.seal import Sealer
from testing.conditions import wait_until
from testing.kv_transfer.filing import answers, conversations, filing, num_cached
from wire.errors import ConfigError
from wire.messages.cache_salt import owner_of_given, owner_of_key, salt_of_key
from wire.messages.purge import PurgePrefixes
from wire.messages.sampling_params import SamplingParams

ALICE, BOB = salt_of_key("alice", ""), salt_of_key("bob", "")
OF_ALICE, OF_BOB = PurgePrefixes(owner_of_key("alice")), PurgePrefixes(owner_of_key("bob"))
PROMPTS = {ALICE: conversations(6, 1, seed=1), BOB: conversations(6, 1, seed=2)}


def settings(directory, **more):
    return FileCache(directory, 64 << 20, **{"wait_s": 30.0, **more})


def segments(directory):
    return sorted(directory.glob("*/*.segment"))


def run_both(one):
    return {salt: one.run(prompts, cache_salt=salt) for salt, prompts in PROMPTS.items()}


def fill(model_dir, files):
    """Run prompts of both, mixed, until all that host memory has is in files."""
    with filing(model_dir, files) as one:
        for pair in zip(*PROMPTS.values(), strict=True):
            for salt, prompt in zip(PROMPTS, pair, strict=True):
                one.run([prompt], cache_salt=salt)
        one.settle()
        assert one.figures.written > 6


@pytest.fixture(scope="module", params=["clear", pytest.param("encrypted", marks=pytest.mark.exhaustive)])
def filled(request, bundled_model, tmp_path_factory):
    """A directory with files of both, which each test copies, and the key's file."""
    directory, key_file = tmp_path_factory.mktemp("filled"), None
    if request.param == "encrypted":
        key_file = tmp_path_factory.mktemp("key") / "key"
        key_file.write_text("ab" * 32)
    fill(bundled_model, settings(directory, key_file=key_file))
    return directory, key_file


@pytest.fixture
def files(filled, tmp_path):
    directory, key_file = filled
    shutil.copytree(directory, tmp_path / "files")
    return settings(tmp_path / "files", key_file=key_file)


def extents_of(one, owner):
    """Returns the places of an owner's records: path, offset and length."""
    return [
        (segment.path, extent.offset, extent.num_bytes)
        for segment in one.store._segments.all
        for extent in segment.extents
        if extent.owner == segment.seal.tag(owner)
    ]


def bytes_at(places):
    return [path.read_bytes()[offset : offset + length] for path, offset, length in places]


def check_bob_alone_is_left(model_dir, files):
    with filing(model_dir, files) as again:
        assert not any(again.figures.failures.values()), again.figures.failures
        assert not extents_of(again, owner_of_key("alice"))
        found = run_both(again)
        assert num_cached(found[ALICE]) == 0
        assert num_cached(found[BOB]) > 0
        assert again.figures.read > 0


def test_a_key_s_prompts_are_overwritten_and_another_s_stay(bundled_model, files):
    with filing(bundled_model, files) as one:
        before = run_both(one)
        assert min(num_cached(found) for found in before.values()) > 0
        one.settle()
        places = extents_of(one, owner_of_key("alice"))
        assert len(places) > 2
        others = bytes_at(extents_of(one, owner_of_key("bob")))
        num_starts, purged = one.purge(OF_ALICE)
        assert num_starts > 0
        assert (purged.num_records, purged.error) == (len(places), "")
        assert purged.num_bytes == sum(length for *_, length in places)
        assert all(not any(data[64:]) for data in bytes_at(places)), "zeros behind what says how long it was"
        assert bytes_at(extents_of(one, owner_of_key("bob"))) == others
        assert one.figures.purged == len(places)
        found = run_both(one)
        assert found[ALICE][0].measured.num_cached == 0
        assert num_cached(found[BOB]) > 0
        assert [answers(found[salt]) for salt in found] == [answers(before[salt]) for salt in before]
        one.settle()
        one.purge(OF_ALICE)
        owned = one.engine.scheduler.owned
        assert owned.cache.num_available_blocks == owned.blocks.capacity
    check_bob_alone_is_left(bundled_model, files)


def test_memory_alone_is_purged_without_files(bundled_model):
    with filing(bundled_model, None) as one:
        run_both(one)
        owned = one.engine.scheduler.owned
        assert one.engine.purges.purge(OF_ALICE) > 0
        assert one.engine.purges.purge(OF_ALICE) == 0, "nothing is left"
        found = run_both(one)
        assert found[ALICE][0].measured.num_cached == 0
        assert num_cached(found[BOB]) > 0
        assert one.engine.purges.purge(PurgePrefixes()) > 0
        assert owned.blocks.num_free == owned.blocks.capacity
        assert owned.slots.num_free == owned.slots.capacity
        assert owned.cache.tier.figures.used_bytes == 0
        assert not owned.cache.journal.news(None).added


def test_requests_under_way_are_named_until_they_end(bundled_model):
    with filing(bundled_model, None) as one:
        params = SamplingParams(max_tokens=6, temperature=0)
        one.engine.add(Request("a", PROMPTS[ALICE][0], params, cache_salt=ALICE))
        one.engine.add(Request("b", PROMPTS[BOB][0], params, cache_salt=BOB))
        one.step()
        assert one.engine.purges.begin(OF_ALICE) == {"a"}
        one.engine.purges.purge(OF_ALICE)
        while one.engine.purges.under_way(OF_ALICE):
            one.step()
        assert one.engine.purges.purge(OF_ALICE) > 0, "what it has cached since then"
        (found,) = one.run(PROMPTS[ALICE][:1], cache_salt=ALICE)
        assert found.measured.num_cached == 0


@pytest.mark.parametrize("num_pieces", [1, 4])
def test_a_purge_that_a_crash_has_cut_off_is_made_again(bundled_model, files, tmp_path, num_pieces):
    with filing(bundled_model, files) as one:
        purge = Purge(one.store._segments, OF_ALICE, lambda purged: None)
        for _ in range(num_pieces):
            assert purge.go_on()
        shutil.copytree(files.directory, tmp_path / "crashed")
    crashed = settings(tmp_path / "crashed", key_file=files.key_file)
    with filing(bundled_model, crashed) as again:
        assert extents_of(again, owner_of_key("alice")), "some are left"
        again.purge(OF_ALICE)
    check_bob_alone_is_left(bundled_model, crashed)


@pytest.mark.parametrize(("limit", "least"), [("WRITE_BYTES_PER_S", 1), ("WRITE_CORE_SHARE", 1e-9)])
def test_a_start_that_is_half_written_is_not_written(bundled_model, tmp_path, monkeypatch, limit, least):
    files = settings(tmp_path)
    with filing(bundled_model, files) as one:
        one.run(PROMPTS[BOB], cache_salt=BOB)
        one.settle()
        one.engine.scheduler.owned.cache.clear()  # so that nothing of bob is written any more
        with monkeypatch.context() as patch:
            patch.setattr(file_store, "WRITE_PIECE_BYTES", 4096)
            patch.setattr(write_pace, "IDLE_CORE_SHARE", -1.0)  # never idle: clocks differ a little
            patch.setattr(write_pace, limit, least)  # the second piece comes after an hour
            first = one.run(PROMPTS[ALICE], cache_salt=ALICE)
            wait_until(lambda: one.step() or waits_for_an_hour(one), "the first piece is written")
            places = extents_of(one, owner_of_key("alice"))
            assert any(any(data) for data in bytes_at(places))
            _, purged = one.purge(OF_ALICE)
            assert purged.num_records == 1
        assert not any(any(data[64:]) for data in bytes_at(places))
        one.store._pace = write_pace.WritePace()
        found = one.run(PROMPTS[ALICE], cache_salt=ALICE)
        assert found[0].measured.num_cached == 0
        assert answers(found) == answers(first)
        one.settle()
        one.purge(OF_ALICE)
    check_bob_alone_is_left(bundled_model, files)


def waits_for_an_hour(one):
    return one.store._pace._until_s > time.monotonic() + 1000


def test_a_start_that_is_being_read_is_not_kept(bundled_model, files):
    with filing(bundled_model, files) as one:
        tier, gate = one.engine.scheduler.owned.cache.tier, threading.Event()
        one.store._thread.post(gate.wait)
        params = SamplingParams(max_tokens=1, temperature=0)
        one.engine.add(Request("a", PROMPTS[ALICE][0], params, cache_salt=ALICE))
        one.step()
        assert one.engine.scheduler.owned.files.fetches
        one.engine.cancel("a")
        one.purge_with(OF_ALICE, gate.set)
        wait_until(lambda: one.step() or not one.engine.scheduler.owned.files.fetches, "the read has ended")
        assert not one.engine.scheduler.owned.files.fetches
        assert (tier.num_starts, tier._pages.num_free) == (0, tier.memory.num_pages)
        found = run_both(one)
        assert found[ALICE][0].measured.num_cached == 0
        assert num_cached(found[BOB]) > 0


def test_what_can_not_be_read_may_be_of_anybody_and_goes(bundled_model, files):
    """A torn record at the end of a segment, such as ``kill -9`` leaves."""
    (path, *_) = segments(files.directory)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(512) + b"of alice, perhaps" * 500)
    with filing(bundled_model, files) as one:
        assert one.figures.failures["torn"] == 1
        one.purge(PurgePrefixes(owner_of_key("carol")))
    assert not any(path.read_bytes()[size:])


def test_nothing_is_found_of_an_unknown_key(bundled_model, files):
    with filing(bundled_model, files) as one:
        data = [path.read_bytes() for path in segments(files.directory)]
        for owner in (owner_of_key("carol"), owner_of_given("alice"), "", owner_of_key("alice "), "key"):
            assert one.purge(PurgePrefixes(owner)) == (0, PurgedFiles())
        assert data == [path.read_bytes() for path in segments(files.directory)]


def test_files_of_an_age_and_all_files_are_deleted(bundled_model, files):
    with filing(bundled_model, files) as one:
        run_both(one)
        one.settle()
        assert one.purge(PurgePrefixes(older_than_s=3600.0)) == (0, PurgedFiles())
        num_starts, purged = one.purge(PurgePrefixes(older_than_s=0.0))
        assert num_starts == 0, "of what memory holds nobody knows the age"
        assert purged.num_records > 6
        assert not segments(files.directory)
        assert not one.store.index.num_blocks
        num_starts, _ = one.purge(PurgePrefixes())
        assert num_starts > 0
        assert all(found[0].measured.num_cached == 0 for found in run_both(one).values())


def test_a_segment_that_can_not_be_overwritten_is_deleted(bundled_model, files, monkeypatch):
    with filing(bundled_model, files) as one:
        places = extents_of(one, owner_of_key("alice"))

        def fail(fd, data, offset):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            _, purged = one.purge(OF_ALICE)
        assert purged.num_records == len(places)
        assert purged.error == ""
        assert not any(path.exists() for path, *_ in places)


def test_files_of_stopped_servers_are_purged_from_the_command_line(bundled_model, files):
    sealer = Sealer.from_file(files.key_file)
    (folder,) = folders(files.directory)
    purged = purge_folder(folder, OF_ALICE, sealer)
    assert purged.num_records > 2
    assert purge_folder(folder, OF_ALICE, sealer).num_records == 0
    check_bob_alone_is_left(bundled_model, files)
    encrypted = r"is encrypted with {}, .* give its `file_cache_key_file`, or delete the folder"
    says = {
        Sealer(b"other" + b"k" * 27): encrypted.format("another key"),
        Sealer(): encrypted.format("a key"),
    }
    if files.key_file is None:
        says = {Sealer(b"k" * 32): "is not encrypted: leave out `file_cache_key_file`"}
    for wrong, message in says.items():
        with pytest.raises(ConfigError, match=message):
            purge_folder(folder, OF_BOB, wrong)
    assert purge_folder(folder, PurgePrefixes(older_than_s=3600.0), Sealer()).num_bytes == 0
    assert purge_folder(folder, PurgePrefixes(), Sealer()).num_bytes > 0
    assert not segments(files.directory)


def test_a_server_purges_folders_that_no_server_uses_too(bundled_model, files):
    (folder,) = folders(files.directory)
    other = shutil.copytree(folder, folder.with_name("gone-gone-7"))
    with filing(bundled_model, files) as one:
        own = len(extents_of(one, owner_of_key("alice")))
        assert one.purge(OF_ALICE)[1].num_records == 2 * own
        assert list(other.glob("*.segment"))
        one.purge(PurgePrefixes())
        assert not list(other.glob("*.segment"))


def test_files_of_an_older_format_are_foreign(bundled_model, files):
    for path in segments(files.directory):
        data = bytearray(path.read_bytes())
        data[8:12] = (1).to_bytes(4, "little")
        path.write_bytes(data)
    with filing(bundled_model, files) as one:
        assert one.figures.failures["foreign"] > 0
        assert not segments(files.directory)


@pytest.mark.exhaustive
def test_all_ranks_delete_their_shares(bundled_model, tmp_path):
    files, two = settings(tmp_path / "files"), {"tensor_parallel": 2}
    with filing(bundled_model, files, **two) as one:
        before = run_both(one)
        one.settle()
        num_starts, purged = one.purge(OF_ALICE)
        assert num_starts > 0
        assert purged.num_records >= 2 * 3, "three of each rank"
        one.check_ranks_agree()
        found = run_both(one)
        assert found[ALICE][0].measured.num_cached == 0
        assert num_cached(found[BOB]) > 0
        assert [answers(found[salt]) for salt in found] == [answers(before[salt]) for salt in before]
        one.settle()
        one.purge(OF_ALICE)
        one.check_ranks_agree()
    with filing(bundled_model, files, **two) as again:
        found = run_both(again)
        assert num_cached(found[ALICE]) == 0
        assert num_cached(found[BOB]) > 0
