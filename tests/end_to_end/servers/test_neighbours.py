"""Cached prompts that one prefill server reads out of another one's host memory, over real processes."""

import httpx
import pytest

from testing.fleets.clients import greedy_body
from testing.fleets.neighbours import FLAGS, NAMES, ask, ask_and_publish, failures, figure, prompts_of
from testing.fleets.stack import running_stack

TOKEN = "an-admin-token-for-neighbours-0123456789"


@pytest.mark.exhaustive
def test_a_prompt_that_another_server_has_is_read_from_there(stacks):
    stack = stacks("up", *FLAGS)
    first, second = NAMES
    (prompt,) = prompts_of(1, seed=1)
    body = greedy_body(prompt, 8)
    before = figure(stack, second, "read_prefixes_total")
    computed, expected = ask_and_publish(stack, body, first)
    assert computed == 0
    assert ask(stack, body, second) == (192, expected)
    assert figure(stack, second, "read_prefixes_total") == before + 1
    assert figure(stack, second, "read_bytes_total") > 0
    assert figure(stack, first, "lent_prefixes_total") >= 1
    assert failures(stack, second) == {}
    stack.wait_until(lambda: figure(stack, first, "lent_now_bytes") == 0, "the loan has ended")
    assert ask(stack, body, second) == (192, expected)
    assert figure(stack, second, "read_prefixes_total") == before + 1, "it is here now"
    longer = greedy_body([*prompt, *expected, 7, 8, 9, *prompts_of(1, seed=2, num_tokens=60)[0]], 8)
    cached, answer = ask_and_publish(stack, longer, first)
    assert cached >= 192
    assert ask(stack, longer, second)[1] == answer
    stack.wait_until(stack.is_idle, "nothing is held")


@pytest.mark.exhaustive
def test_a_cache_salt_separates_neighbours_too(stacks):
    stack = stacks("up", *FLAGS)
    first, second = NAMES
    (prompt,) = prompts_of(1, seed=3)
    _, expected = ask_and_publish(stack, greedy_body(prompt, 8) | {"cache_salt": "one"}, first)
    assert ask(stack, greedy_body(prompt, 8) | {"cache_salt": "two"}, second) == (0, expected)


@pytest.mark.exhaustive
def test_a_drained_server_s_prompts_are_found_at_the_one_that_stays(tmp_path):
    token_file = tmp_path / "admin-token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    first, second = NAMES
    bodies = [greedy_body(prompt, 8) for prompt in prompts_of(3, seed=5)]
    bodies[0]["cache_salt"] = "hers"
    with running_stack("up", *FLAGS, "--admin-token-file", str(token_file)) as stack:
        expected = [ask_and_publish(stack, body, first)[1] for body in bodies]
        admin = httpx.Client(
            base_url=f"{stack.url}/admin/v1",
            headers={"Authorization": f"Bearer {TOKEN}"},
            verify=stack.trust(),
        )
        address = stack.processes()[first].address
        workers = admin.get("/workers").json()["workers"]
        (worker,) = (one["id"] for one in workers if one["address"] == address)
        assert admin.post(f"/workers/{worker}/drain").status_code == 200
        stack.wait_until(
            lambda: figure(stack, first, "handed_over_prefixes_total") >= len(bodies), "all is handed over"
        )
        read = figure(stack, second, "read_prefixes_total")
        assert read == figure(stack, first, "handed_over_prefixes_total")
        assert [ask(stack, body, second) for body in bodies] == [(192, tokens) for tokens in expected]
        assert figure(stack, second, "read_prefixes_total") == read, "they were there"
        stack.wait_until(lambda: stack.stats(first)[first].drain == "drained", "the server is drained")
        assert admin.post("/purge", json={"cache_salt": "hers"}).json()["num_starts"] >= 2
        assert [ask(stack, body, second) for body in bodies[:2]] == [(0, expected[0]), (192, expected[1])]
