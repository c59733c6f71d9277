"""Which of a server's hosts this is, by its flags and by what launchers say in the environment."""

from __future__ import annotations

import argparse

import pytest

from engine.group.nodes import ONE_NODE, Nodes
from engine.group.store import GroupStore
from testing.launchers import AGENT, LWS, TORCHRUN
from twinfang.stack.node_place import find_nodes
from wire.errors import ConfigError

SETTING = "nodes.store"
HOSTS = TORCHRUN | {"LOCAL_RANK": "0"}


def flags(nnodes, rank=None, address=None):
    return argparse.Namespace(nnodes=nnodes, node_rank=rank, dist_init_addr=address)


def test_a_server_that_asks_for_no_hosts_is_on_one_wherever_it_was_started():
    assert find_nodes(flags(1), LWS | HOSTS) is ONE_NODE


def test_flags_win_over_launchers():
    assert find_nodes(flags(4, 2, "a:1"), LWS | HOSTS) == Nodes(2, 4, GroupStore("a:1", SETTING))


def test_a_pod_of_a_leader_worker_set_is_a_host():
    assert find_nodes(flags(2), LWS) == Nodes(1, 2, GroupStore("decode-0.decode.ns:8290", SETTING))
    assert find_nodes(flags(2, address="a:1"), LWS) == Nodes(1, 2, GroupStore("a:1", SETTING))


def test_a_process_of_torchrun_is_a_host_and_uses_the_agent_s_store():
    assert find_nodes(flags(8), HOSTS) == Nodes(5, 8, GroupStore("10.0.0.6:29500", SETTING))
    assert find_nodes(flags(8), HOSTS | AGENT) == Nodes(
        5, 8, GroupStore("10.0.0.6:29500", SETTING, False, "job/2")
    )
    assert find_nodes(flags(8, address="a:1"), HOSTS | AGENT) == Nodes(5, 8, GroupStore("a:1", SETTING))


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        (flags(1, 1), {}, "--node-rank 1 is for a server on several hosts: give --nnodes"),
        (flags(1, address="a:1"), {}, "--dist-init-addr a:1 is for a server on several hosts"),
        (flags(2, 2, "a:1"), {}, "`nodes.rank` must be from 0 to 1 with `nodes.size` 2, got 2"),
        (flags(2, 1), {}, "give --dist-init-addr, the HOST:PORT on which host 0"),
        (flags(2), {}, "--nnodes 2: nothing says which of them this is; give --node-rank"),
        (flags(3), LWS, "--nnodes is 3 and the launcher's LWS_GROUP_SIZE 2"),
        (flags(2), LWS | {"LWS_LEADER_ADDRESS": ""}, "LWS_LEADER_ADDRESS is not: give --dist-init-addr"),
        (flags(2), HOSTS, "--nnodes is 2 and the launcher's WORLD_SIZE 8: start one process a host"),
        (flags(8), HOSTS | {"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'; expected a number"),
        (flags(8), HOSTS | {"MASTER_ADDR": ""}, "MASTER_ADDR or MASTER_PORT is not: give --dist-init-addr"),
    ],
)
def test_what_contradicts_itself_is_refused(given, environment, message):
    with pytest.raises(ConfigError, match=message):
        find_nodes(given, environment)
