"""A key's cached prompts are deleted on real servers: none is found afterwards, also after ``kill -9``."""

import json
import random
import re
import subprocess
import sys

import httpx
import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from testing.fleets.clients import greedy_body
from testing.fleets.stack import running_router, running_stack

SMALL = ("--max-num-seqs", "2", "--max-model-len", "256", "--cached-states", "2", "--cache-memory", "0.004")
FILES = ("--host-cache-size", "64M", "--file-cache-size", "256M", "--file-cache-wait", "20")
SERVERS = ("prefill-0", "prefill-1")
NUM_PROMPTS = 12


def metric(stack, server, name):
    return float(re.search(rf"^twinfang_{name} (\S+)$", stack.metrics(server), re.MULTILINE)[1])


class Fleet:
    """A stack, and a router with keys in front of its servers."""

    def __init__(self, stack, url, keys):
        self.stack, self.url, self.keys = stack, url, keys

    def cached(self, who, bodies):
        """Sends prompts; returns how many tokens of each were cached."""
        counts = []
        for body in bodies:
            reply = httpx.post(f"{self.url}/v1/completions", json=body, headers=self.auth(who), timeout=60.0)
            assert reply.status_code == 200, reply.text
            counts.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        return counts

    def auth(self, who):
        return {"Authorization": f"Bearer {self.keys[who]}"}

    def purge(self, who="operator", **body):
        return httpx.post(f"{self.url}/admin/v1/purge", json=body, headers=self.auth(who), timeout=60.0)

    def wait_until_written(self):
        def all_are_written() -> bool:
            return all(
                metric(self.stack, name, "file_cache_written_prefixes_total")
                >= metric(self.stack, name, "host_cache_demoted_prefixes_total")
                for name in SERVERS
            )

        self.stack.wait_until(all_are_written, "what host memory has is written")


def purged(stack, name):
    return metric(stack, name, "file_cache_purged_prefixes_total")


@pytest.mark.exhaustive
@pytest.mark.in_clear  # a router of its own
def test_a_key_s_prompts_are_gone_for_good_and_another_s_stay(tmp_path):
    choose = random.Random(5)
    keys = {name: new_key() for name in ("alice", "bob", "operator")}
    key_file, audit, files = tmp_path / "keys", tmp_path / "audit.jsonl", tmp_path / "files"
    key_file.write_text(
        "\n".join(
            key_line(ApiKey(name, digest_of(key), role="configure" if name == "operator" else None))
            for name, key in keys.items()
        )
    )
    prompts = {
        name: [greedy_body([choose.randrange(5, 900) for _ in range(200)], 4) for _ in range(NUM_PROMPTS)]
        for name in ("alice", "bob")
    }
    flags = ("--prefill", "2", *SMALL, *FILES, "--file-cache-dir", str(files))
    with running_stack("up", *flags) as stack:
        servers = [
            part
            for name, one in stack.processes().items()
            if name != "router"
            for part in (f"--{name.partition('-')[0]}", one.address)
        ]
        more = ("--api-keys-file", str(key_file), "--audit-log", str(audit))
        with running_router(*more, "--prefill-policy", "prefix_affinity", *servers) as url:
            fleet = Fleet(stack, url, keys)
            for pair in zip(*prompts.values(), strict=True):
                for who, body in zip(prompts, pair, strict=True):
                    fleet.cached(who, [body])
            fleet.wait_until_written()
            assert fleet.purge("alice", key="bob").status_code == 403
            told = fleet.purge(key="alice")
            assert told.status_code == 200, told.text
            counts = told.json()
            assert counts["num_servers"] == 3
            assert counts["num_starts"] >= NUM_PROMPTS
            assert counts["num_records"] >= NUM_PROMPTS / 2
            assert counts["num_records"] == sum(purged(stack, name) for name in SERVERS)
            assert fleet.purge(key="alice").json()["warning"]
            pids = {name: stack.kill(name) for name in SERVERS}
            for name, pid in pids.items():
                stack.wait_until(lambda n=name, p=pid: stack.has_restarted(n, p), f"{name} is back")
            addresses = [stack.processes()[name].address for name in SERVERS]
            stack.wait_until(lambda: knows_files(url, addresses, fleet.auth("operator")), "files are known")
            assert fleet.cached("alice", prompts["alice"]) == [0] * NUM_PROMPTS
            assert fleet.cached("bob", prompts["bob"]).count(192) >= NUM_PROMPTS / 2
            calls = [json.loads(line) for line in audit.read_text().splitlines()]
            (noted,) = [one for one in calls if one.get("after", {}).get("num_records")]
            assert (noted["who"], noted["before"]["key"]) == ("operator", "alice")
        used = run_command(files, "--of-key", "bob")
        assert used.returncode == 1
        assert "is in use by a server" in used.stderr
    stopped = run_command(files, "--of-key", "bob")
    assert stopped.returncode == 0, stopped.stderr
    assert sum(map(int, re.findall(r"deleted (\d+) cached prompts", stopped.stdout))) >= NUM_PROMPTS / 2


def knows_files(url, addresses, headers):
    workers = httpx.get(f"{url}/admin/v1/workers", headers=headers, timeout=60.0).json()["workers"]
    known = {one["address"]: one["cached_prefixes"] for one in workers}
    return all(known[address] for address in addresses)


def run_command(directory, *flags):
    command = [sys.executable, "-m", "twinfang", "purge", str(directory), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
