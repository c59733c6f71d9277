"""Command lines of a stack's processes, planned from flag values; nothing is started."""

from __future__ import annotations

import pytest

from testing.command_lines import BY_NAME, parsed
from twinfang.stack.stack import UCX_ON_LOOPBACK, child_environment, plan_stack, stack_environment
from wire.errors import ConfigError


@pytest.mark.parametrize(("name", "roles"), [("up", {"prefill": 1, "decode": 1}), ("serve", {"both": 1})])
def test_all_servers_of_a_stack_are_told_the_same_of_speculation(name, roles):
    """A prefill server fills the KV of the layers that its decode servers draft with."""
    given = ("--speculative", "3", "--drafter", "ngram", "--ngram-min", "1", "--ngram-max", "6")
    stack = plan_stack(parsed(BY_NAME[name], *given, "--steps-ahead", "0", "--port", "0"), roles)
    assert len(stack.servers) == len(roles)
    for server in stack.servers:
        command, *arguments = server.arguments
        told = parsed(BY_NAME[command], *arguments)
        assert (told.speculative, told.drafter, told.ngram_min, told.ngram_max) == (3, "ngram", 1, 6)
        assert told.steps_ahead == 0


def test_without_flags_the_servers_of_a_stack_choose_for_themselves():
    stack = plan_stack(parsed(BY_NAME["up"], "--port", "0"), {"prefill": 1, "decode": 1})
    for server in stack.servers:
        told = parsed(BY_NAME[server.arguments[0]], *server.arguments[1:])
        assert (told.speculative, told.drafter, told.steps_ahead) == (0, None, None)


def test_the_router_of_a_stack_is_told_its_limits():
    limits = ("--max-body-size", "0.5", "--max-choices", "7", "--port", "0")
    stack = plan_stack(parsed(BY_NAME["serve"], *limits), {"both": 1})
    told = parsed(BY_NAME["router"], *stack.router.arguments[1:])
    assert (told.max_body_size, told.max_choices) == (0.5, 7)


def test_decode_servers_step_back_where_prefill_servers_share_their_cores():
    stack = plan_stack(parsed(BY_NAME["up"], "--port", "0"), {"prefill": 1, "decode": 1})
    prefill, decode = stack.servers
    assert decode.arguments[decode.arguments.index("--nice") + 1] == "5"
    assert "--nice" not in prefill.arguments
    monolithic = plan_stack(parsed(BY_NAME["serve"], "--port", "0"), {"both": 1})
    assert "--nice" not in monolithic.servers[0].arguments


def test_the_password_of_a_store_is_in_no_command_line():
    url = "redis://:secret@redis:6379/0"
    values = parsed(BY_NAME["up"], "--limit-store", url, "--workers", "2", "--port", "0")
    stack = plan_stack(values, {"prefill": 1, "decode": 1})
    assert not any("secret" in argument for argument in stack.router.arguments)
    environment = child_environment({"TWINFANG_WORKERS": "2", "HOME": "/root"}, values)
    assert environment == {"HOME": "/root", "TWINFANG_LIMIT_STORE": url}


def test_ucx_of_a_stack_without_gpus_listens_on_loopback_unless_told_otherwise():
    assert stack_environment({}, "cpu") == UCX_ON_LOOPBACK
    assert UCX_ON_LOOPBACK["UCX_NET_DEVICES"] == "lo"
    told = {"UCX_NET_DEVICES": "eth0", "UCX_MEM_EVENTS": "y"}
    assert stack_environment(told, "cpu") == told
    assert stack_environment({}, "cuda") == {}


@pytest.mark.parametrize("store", ["postgres://db", "redis:", "sqlite:", "/tmp/limits"])
def test_a_store_of_an_unknown_kind_is_refused(store):
    with pytest.raises(ConfigError, match=r"--limit-store .*expected sqlite:FILE or redis://"):
        parsed(BY_NAME["router"], "--limit-store", store)


@pytest.mark.parametrize(("name", "roles"), [("up", {"prefill": 1, "decode": 1}), ("serve", {"both": 1})])
def test_host_memory_and_files_are_for_the_servers_that_run_prompts(name, roles):
    files = ("--file-cache-dir", "/nowhere", "--file-cache-size", "200G")
    values = parsed(BY_NAME[name], "--host-cache-size", "8G", *files, "--port", "0")
    for server in plan_stack(values, roles).servers:
        told = parsed(BY_NAME[server.arguments[0]], *server.arguments[1:])
        is_decode = server.name.startswith("decode")
        assert told.host_cache_size == (0 if is_decode else 8)
        assert (told.file_cache_dir is None, told.file_cache_size) == (is_decode, 0 if is_decode else 200)
    assert child_environment({"TWINFANG_HOST_CACHE_SIZE": "8", "HOME": "/root"}, values) == {"HOME": "/root"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--file-cache-dir", "/nowhere", "--host-cache-size", "1"), "/nowhere needs a size"),
        (("--file-cache-dir", "/nowhere", "--file-cache-size", "1"), "needs `host_cache_bytes`"),
        (("--host-cache-size", "1", "--cache-mode", "none"), "`host_cache_bytes` 1073741824 means nothing"),
    ],
)
def test_tiers_that_no_server_would_have_are_refused_before_one_starts(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan_stack(parsed(BY_NAME["up"], *arguments, "--port", "0"), {"prefill": 1, "decode": 1})
