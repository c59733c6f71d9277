"""Where a flag's value comes from, and what a bad one is told."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from decode_server.config import DecodeConfig
from engine.config import EngineConfig
from prefill_server.config import PrefillConfig
from router.config import ModelSource, RouterConfig
from twinfang.commands.table import COMMANDS
from twinfang.flags import router as router_flags
from twinfang.flags import speculation, table
from twinfang.flags.flag import Flag, FlagGroup, add_flags, as_arguments, resolve
from twinfang.flags.host_cache import HOST_CACHE_SIZE, NEIGHBOUR_WAIT
from twinfang.flags.values import (
    address,
    gibibytes,
    integer,
    model_alias,
    model_source,
    positive,
    positive_gibibytes,
)
from wire.errors import ConfigError

SIZE = Flag("--size", "N", integer(1, 9), "a size", default=3)
PEER = Flag("--peer", "HOST:PORT", address, "a peer", repeatable=True)
SHARE = Flag("--share", "GIB", positive("GiB"), "a share")
GROUPS = (FlagGroup("all", (SIZE, PEER, SHARE)),)


def values(*arguments: str, **environment: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, GROUPS)
    return resolve(GROUPS, parser.parse_args(arguments), environment)


def test_the_command_line_wins_over_the_environment_and_that_over_the_default():
    assert values().size == 3
    assert values(TWINFANG_SIZE="4").size == 4
    assert values("--size", "5", TWINFANG_SIZE="4").size == 5


def test_a_bad_variable_is_not_looked_at_where_the_command_line_has_the_flag():
    assert values("--size", "5", TWINFANG_SIZE="nonsense").size == 5


def test_a_router_s_model_has_a_name_of_its_own_or_its_folder_s(tmp_path):
    folder = tmp_path / "large=1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert model_source(str(folder)) == ModelSource("large=1", folder)
    assert model_source(f"chat={folder}") == ModelSource("chat", folder)
    for text in (f"={folder}", "chat=/nowhere", "/nowhere"):
        with pytest.raises(ValueError, match=r"expected|no such directory"):
            model_source(text)


def test_a_size_is_a_number_of_gib_or_has_a_unit():
    sizes = {"8": 8, "8G": 8, "8GiB": 8, "1.5": 1.5, "512M": 0.5, "0": 0, str(1e-05): 1e-05}
    assert {text: gibibytes(text) for text in sizes} == sizes
    for text in ("", "-1", "G", "8K", "8 GB", "inf", "nan"):
        with pytest.raises(ValueError, match="such as 8, 8G or 512M"):
            gibibytes(text)
    assert positive_gibibytes("512M") == 0.5
    for text in ("0", "0G"):
        with pytest.raises(ValueError, match="above 0, such as 8, 8G or 512M"):
            positive_gibibytes(text)


def test_an_alias_crosses_to_a_child():
    alias = model_alias("gpt-4o=chat")
    assert (alias.name, alias.model) == ("gpt-4o", "chat")
    assert model_alias(str(alias)) == alias
    for text in ("gpt-4o", "=chat", "gpt-4o="):
        with pytest.raises(ValueError, match="expected NAME=MODEL"):
            model_alias(text)


def test_one_name_can_not_be_that_of_two_models(bundled_model):
    router = next(command for command in COMMANDS if command.name == "router")
    parser = argparse.ArgumentParser()
    add_flags(parser, router.groups)
    given = ["--decode", "a:1", "--model", str(bundled_model), "--model", f"b={bundled_model}"]
    given += ["--served-model-name", "c"]
    with pytest.raises(ConfigError, match="--served-model-name 'c' can't name 2 models"):
        router.prepare(resolve(router.groups, parser.parse_args(given), {}))


def test_an_empty_variable_is_no_value():
    assert values(TWINFANG_SIZE="").size == 3


def test_a_repeatable_flag_collects_and_its_variable_is_comma_separated():
    assert values().peer == ()
    assert values("--peer", "a:1", "--peer", "b:2").peer == ("a:1", "b:2")
    assert values(TWINFANG_PEER="a:1, b:2").peer == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "10"), r"^--size '10': expected an integer from 1 to 9$"),
        (("--size", "many"), r"^--size 'many': expected an integer from 1 to 9$"),
        (("--share", "0"), r"^--share '0': expected a number of GiB above 0$"),
        (("--share", "nan"), r"^--share 'nan': expected a number of GiB above 0$"),
        (("--share", "inf"), r"^--share 'inf': expected a number of GiB above 0$"),
        (("--peer", "nowhere"), r"^--peer 'nowhere': expected host:port"),
        (("--peer", "a:70000"), r"^--peer 'a:70000': expected host:port"),
    ],
)
def test_an_error_names_the_flag_the_value_and_what_was_expected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        values(*arguments)


def test_an_error_in_a_variable_names_the_variable():
    with pytest.raises(ConfigError, match=r"^TWINFANG_SIZE '10': expected an integer from 1 to 9$"):
        values(TWINFANG_SIZE="10")


def test_the_variable_that_kubernetes_sets_for_a_service_of_our_name_is_explained():
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        values(TWINFANG_SIZE="tcp://10.0.0.1:8000")


def test_a_child_gets_the_same_values_on_its_command_line():
    given = values("--size", "5", "--peer", "a:1", "--peer", "b:2", "--share", "0.5")
    assert values(*as_arguments(GROUPS[0].flags, given)) == given


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_no_command_has_two_flags_of_one_name(command):
    names = [flag.name for group in command.groups for flag in group.flags]
    assert len(names) == len(set(names))


def test_defaults_are_those_of_the_configuration_classes():
    in_class = {
        field.name: field.default
        for cls in (EngineConfig, PrefillConfig, DecodeConfig, RouterConfig)
        for field in dataclasses.fields(cls)
    }
    for flag, name in (
        (table.DTYPE, "dtype"),
        (table.WEIGHT_DTYPE, "weight_dtype"),
        (table.DEVICE, "device"),
        (table.MAX_MODEL_LEN, "max_model_len"),
        (table.MAX_NUM_SEQS, "max_num_seqs"),
        (table.MAX_BATCH_TOKENS, "max_batch_tokens"),
        (table.BLOCK_SIZE, "block_size"),
        (table.CACHE_MEMORY, "cache_memory_bytes"),
        (HOST_CACHE_SIZE, "host_cache_bytes"),
        (NEIGHBOUR_WAIT, "neighbour_wait_s"),
        (speculation.SPECULATIVE, "num_speculative"),
        (speculation.DRAFTER, "drafter"),
        (speculation.NGRAM_MIN, "ngram_min"),
        (speculation.NGRAM_MAX, "ngram_max"),
        (speculation.SPECULATIVE_STATE, "speculative_state"),
        (table.STEPS_AHEAD, "steps_ahead"),
        (table.STREAM_INTERVAL, "stream_interval_s"),
        (table.STEP_DEADLINE, "step_deadline_s"),
        (table.HANG_DEADLINE, "hang_deadline_s"),
        (table.LEASE_TTL, "lease_ttl_s"),
        (table.ADVERTISE_HOST, "advertise_host"),
        (table.TRANSFER_DEADLINE, "transfer_deadline_s"),
        (table.VERIFY_HANDOFFS, "verify_handoffs"),
        (router_flags.MAX_REQUESTS_IN_FLIGHT, "max_requests_in_flight"),
        (router_flags.MAX_QUEUE, "max_queue"),
        (router_flags.HOLD, "hold_s"),
        (router_flags.MAX_CHOICES, "max_choices"),
        (router_flags.REQUEST_TIMEOUT, "request_timeout_s"),
        (router_flags.PREFILL_POLICY, "prefill_policy"),
        (router_flags.DECODE_POLICY, "decode_policy"),
        (router_flags.SHUTDOWN_GRACE, "shutdown_grace_s"),
        (router_flags.RESPONSE_STORE_TTL, "response_store_ttl_s"),
    ):
        assert flag.default == in_class[name], flag.name
    assert router_flags.MAX_BODY_SIZE.default * (1 << 20) == in_class["max_body_bytes"]
    assert router_flags.RESPONSE_STORE_SIZE.default * (1 << 20) == in_class["response_store_bytes"]
    assert router_flags.MAX_HEADER_SIZE.default * (1 << 10) == in_class["max_header_bytes"]
