"""Which ranks a process is, by its flags and by what launchers say in the environment."""

from __future__ import annotations

import argparse

import pytest

from testing.launchers import AGENT, LWS, TORCHRUN
from twinfang.commands.servers import prepare_decode
from twinfang.commands.table import DECODE
from twinfang.flags.flag import add_flags, resolve
from twinfang.stack.rank_group import plan_ranks
from twinfang.stack.rank_place import ONLY_PLACE, RankPlace
from wire.errors import ConfigError


def flags(size, rank=None, address=None, *, shares_experts=True, local_rank=0):
    return argparse.Namespace(
        data_parallel_size=size,
        data_parallel_rank=rank,
        data_parallel_address=address,
        enable_expert_parallel=shares_experts,
        local_rank=local_rank,
    )


def test_a_server_that_asks_for_no_ranks_is_alone_wherever_it_was_started():
    assert RankPlace.find(flags(1), LWS | TORCHRUN) == ONLY_PLACE


def test_without_a_launcher_all_ranks_are_here():
    assert RankPlace.find(flags(4), {}) == RankPlace(4, 0, 4)
    assert RankPlace.find(flags(4, address="a:1"), {}) == RankPlace(4, 0, 4, "a:1")


def test_flags_win_over_launchers():
    place = RankPlace.find(flags(4, 2, "10.0.0.6:8290", local_rank=1), LWS | TORCHRUN)
    assert place == RankPlace(4, 2, 1, "10.0.0.6:8290", local_rank=1)


def test_a_pod_of_a_leader_worker_set_has_its_share_of_the_ranks():
    assert RankPlace.find(flags(2), LWS) == RankPlace(2, 1, 1, "decode-0.decode.ns:8290")
    assert RankPlace.find(flags(8), LWS) == RankPlace(8, 4, 4, "decode-0.decode.ns:8290")
    assert RankPlace.find(flags(2, address="a:1"), LWS).address == "a:1"


def test_a_process_of_torchrun_is_one_rank_with_ports_and_gpus_by_its_local_rank():
    place = RankPlace.find(flags(8), TORCHRUN)
    assert place == RankPlace(8, 5, 1, "10.0.0.6:29500", local_rank=1, port_offset=1)


def test_the_store_of_torchrun_s_agent_is_used_and_each_restart_has_keys_of_its_own():
    place = RankPlace.find(flags(8), TORCHRUN | AGENT)
    assert (place.hosts_store, place.life) == (False, "job/2")
    assert RankPlace.find(flags(8, address="a:1"), TORCHRUN | AGENT).hosts_store


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        (flags(1, 1), {}, "--data-parallel-rank 1 is for several ranks: give --data-parallel-size"),
        (flags(1, address="a:1"), {}, "--data-parallel-address a:1 is for several ranks"),
        (flags(2, 2, "a:1"), {}, "data-parallel rank 2 is not within --data-parallel-size 2"),
        (flags(2, 1), {}, "give --data-parallel-address, the HOST:PORT on which rank 0"),
        (flags(3), LWS, "--data-parallel-size 3 can't be divided among the 2 pods"),
        (flags(2), LWS | {"LWS_LEADER_ADDRESS": ""}, "LWS_LEADER_ADDRESS is not"),
        (flags(2), LWS | {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE is 'two'; expected a number"),
        (flags(4), TORCHRUN, "--data-parallel-size is 4 and torchrun's WORLD_SIZE 8"),
        (flags(8), TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT is not: give --data-parallel-address"),
    ],
)
def test_what_contradicts_itself_is_refused(given, environment, message):
    with pytest.raises(ConfigError, match=message):
        RankPlace.find(given, environment)


def test_ranks_that_share_nothing_need_no_address():
    assert RankPlace.find(flags(2, 1, shares_experts=False), {}) == RankPlace(2, 1)


def test_the_ranks_of_a_host_get_ports_one_behind_the_other_and_live_together():
    values = decode_values("--data-parallel-size", "3", "--enable-expert-parallel", "--threads", "2")
    ranks = plan_ranks(values, RankPlace.find(values, {}))
    assert [rank.name for rank in ranks] == ["decode-0", "decode-1", "decode-2"]
    assert [rank.address for rank in ranks] == [f"127.0.0.1:{port}" for port in (8200, 8201, 8202)]
    assert len({rank.fate for rank in ranks}) == 1
    for number, rank in enumerate(ranks):
        place = RankPlace.find(decode_values(*rank.arguments[1:]), LWS)
        assert (place.first, place.count, place.local_rank) == (number, 1, number)
        assert decode_values(*rank.arguments[1:]).metrics_port == 18200 + number
    assert len({RankPlace.find(decode_values(*rank.arguments[1:]), {}).address for rank in ranks}) == 1


def test_ports_that_there_are_not_are_refused():
    values = decode_values("--data-parallel-size", "3", "--port", "65534", "--metrics-port", "off")
    with pytest.raises(ConfigError, match="needs 3 ports"):
        plan_ranks(values, RankPlace.find(values, {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--probe-port", "8202"], "--probe-port 8202 is a port of a rank"),
        (["--probe-port", "18201"], "--probe-port 18201 is a port of a rank"),
        (
            ["--probe-port", "18290", "--metrics-port", "off"],
            "--probe-port 18290 asks ranks on their metrics",
        ),
    ],
)
def test_a_port_for_the_probes_of_all_ranks_is_a_port_of_its_own(arguments, message):
    values = decode_values("--data-parallel-size", "3", *arguments)
    with pytest.raises(ConfigError, match=message):
        plan_ranks(values, RankPlace.find(values, {}))


def test_a_server_alone_has_no_port_for_the_probes_of_all_ranks():
    with pytest.raises(ConfigError, match="--probe-port 18290 is for several ranks on one host"):
        prepare_decode(decode_values("--probe-port", "18290"))


def decode_values(*arguments):
    parser = argparse.ArgumentParser()
    add_flags(parser, DECODE.groups)
    return resolve(DECODE.groups, parser.parse_args(arguments), {})
