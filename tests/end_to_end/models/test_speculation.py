"""With speculation, over real processes, the tokens are those of the monolithic server without speculation.

Stacks of all pairs of checkpoint, drafter, k, cache mode and steps ahead, not of all combinations.
"""

import asyncio
import json
import random
from functools import cache

import httpx
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, make_checkpoint
from testing.fleets.clients import all_at_once, complete, greedy_body, http_client, one_at_a_time, stream
from testing.fleets.stack import run_async, running_router, running_stack

NUM_REQUESTS = 32
NUM_TOKENS = 32
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 130]
FLAGS = (
    "--max-num-seqs",
    "16",
    "--max-model-len",
    "512",
    "--max-batch-tokens",
    "128",
    "--cache-memory",
    "0.1",
)
PROMPT = "def fibonacci(n):\n    if n < 2:\n"

STACKS = [
    pytest.param("bundled", "mtp", 1, "none", 0, marks=pytest.mark.exhaustive),
    ("bundled", "ngram", 3, "align", 1),
    ("bundled", "mtp", 3, "all", 1),
    pytest.param("random", "ngram", 1, "all", 0, marks=pytest.mark.exhaustive),
    pytest.param("random", "ngram", 3, "none", 1, marks=pytest.mark.exhaustive),
    pytest.param("random", "mtp", 1, "align", 1, marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module")
def model_dirs(bundled_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return {"bundled": bundled_model, "random": make_checkpoint(folder, DENSE_WITH_MTP, seed=5)}


@pytest.fixture(scope="module")
def plain(module_stacks):
    """The monolithic server of the bundled model, without speculation."""
    return module_stacks("serve", *FLAGS)


@pytest.fixture(scope="module")
def drafting(module_stacks):
    """A disaggregated stack of the bundled model whose steps mostly gain several tokens."""
    return module_stacks("up", *FLAGS, *speculating("mtp", 3, "all", 1))


@pytest.fixture(scope="module")
def expected(model_dirs, plain):
    """Answers to :func:`bodies` without speculation and without a handoff, of a checkpoint."""

    @cache
    def answers(name):
        if name == "bundled":
            return run_async(lambda: all_at_once(plain, bodies()))
        with running_stack("serve", *FLAGS, "--model", str(model_dirs[name])) as stack:
            return run_async(lambda: all_at_once(stack, bodies()))

    return answers


def speculating(drafter, k, mode="all", steps_ahead=0):
    return (
        *("--speculative", str(k), "--drafter", drafter),
        *("--cache-mode", mode, "--steps-ahead", str(steps_ahead)),
    )


def bodies():
    """Prompts of all sorts of lengths; a third say the same thing again, for look-up to find."""
    choose = random.Random(3)
    prompts = []
    for i in range(NUM_REQUESTS):
        phrase = [choose.randrange(6, 150) for _ in range(7 if i % 3 == 0 else 200)]
        prompts.append((phrase * 20)[: LENGTHS[i % len(LENGTHS)]])
    return [greedy_body(prompt, NUM_TOKENS) for prompt in prompts]


async def staggered(stack, cut_at):
    """All requests, one after the other joining; every third leaves once it has ``cut_at(i)`` tokens."""

    async def answer_of(client, i, body):
        answer = None
        async for answer in stream(client, body):
            if i % 3 == 0 and len(answer.token_ids) >= cut_at(i):
                break
        return answer

    tasks = []
    async with http_client(stack) as client:
        for i, body in enumerate(bodies()):
            tasks.append(asyncio.create_task(answer_of(client, i, body)))
            if i % 4 == 3:  # the next ones meet a batch that is under way
                await asyncio.wait(tasks[-4:], return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.gather(*tasks)


def told(answers):
    return [(answer.token_ids, answer.text, answer.finish_reason) for answer in answers]


def figures(stack, server="decode-0"):
    """Drafts tried and accepted so far, by position."""
    stats = stack.stats(server)[server]
    return stats.drafted_by_position, stats.accepted_by_position


def gained(before, after):
    return tuple(
        tuple(new - old for new, old in zip(news, olds, strict=True))
        for news, olds in zip(after, before, strict=True)
    )


def exported(stack):
    """The decode server's samples of speculation: value by name and position."""
    text = stack.metrics("decode-0")
    return {
        (sample.name.removeprefix("twinfang_spec_decode_"), sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("twinfang_spec_decode_") and not sample.name.endswith("_created")
    }


def check_metrics(stack, k):
    """What the decode server shows is what it counts. Returns the accepted drafts of each position."""
    drafted, accepted = figures(stack)
    assert len(drafted) == len(accepted) == k
    assert all(right <= tried for tried, right in zip(drafted, accepted, strict=True))
    assert list(drafted) == sorted(drafted, reverse=True)
    assert list(accepted) == sorted(accepted, reverse=True)
    shown = {
        ("num_draft_tokens_total", None): sum(drafted),
        ("num_accepted_tokens_total", None): sum(accepted),
    }
    for position in range(k):
        shown["num_draft_tokens_per_pos_total", str(position)] = drafted[position]
        shown["num_accepted_tokens_per_pos_total", str(position)] = accepted[position]
    if drafted[0]:
        shown["mean_accepted_length", None] = pytest.approx(1 + sum(accepted) / drafted[0])
    stack.wait_until(lambda: exported(stack) == shown, "its page shows that, too")
    return accepted


@pytest.mark.parametrize(("model", "drafter", "k", "mode", "steps_ahead"), STACKS)
async def test_answers_equal_those_of_one_server_without_speculation(
    model_dirs, expected, drafting, model, drafter, k, mode, steps_ahead
):
    async def check(stack):
        assert told(await all_at_once(stack, bodies())) == told(expected(model))
        answers = await staggered(stack, cut_at=lambda i: 1 + i % 11)
        for i, (answer, reference) in enumerate(zip(answers, expected(model), strict=True)):
            if i % 3:
                assert told([answer]) == told([reference])
            else:
                assert answer.token_ids == reference.token_ids[: len(answer.token_ids)]
        stack.wait_until(stack.is_idle, "all blocks and slots of both servers are free")
        accepted = check_metrics(stack, k)
        if model == "bundled":
            assert all(accepted)

    flags = speculating(drafter, k, mode, steps_ahead)
    if (model, *flags) == ("bundled", *speculating("mtp", 3, "all", 1)):
        await check(drafting)
        return
    with running_stack("up", *FLAGS, *flags, "--model", str(model_dirs[model])) as stack:
        await check(stack)


@pytest.mark.exhaustive
async def test_drafts_are_as_good_behind_a_handoff_as_without_one(expected, module_stacks, drafting):
    """The MTP layer's KV of the prompt comes from the prefill server; without it drafts would be worse."""
    choose = random.Random(8)
    asked = [greedy_body(PROMPT + f"        return {n}\n" * n, NUM_TOKENS) for n in range(1, 7)]
    asked += [greedy_body([choose.randrange(6, 900) for _ in range(n)], NUM_TOKENS) for n in (2, 17, 90, 200)]
    single = module_stacks("serve", *FLAGS, *speculating("mtp", 3, "all", 1))
    assert told(await all_at_once(single, bodies())) == told(expected("bundled"))
    rates, answers = {}, {}
    for name, stack, server in (("serve", single, "both-0"), ("up", drafting, "decode-0")):
        before = figures(stack, server)
        answers[name] = told(await one_at_a_time(stack, asked))
        rates[name] = gained(before, figures(stack, server))
    print(rates)
    assert answers["up"] == answers["serve"]
    assert rates["up"] == rates["serve"]
    assert rates["up"][1][0] > rates["up"][0][0] / 3


async def test_a_request_that_asks_for_no_drafts_gets_none(expected, drafting):
    drafting.wait_until(drafting.is_idle, "no step of an earlier test is under way")
    before = figures(drafting)
    answers = await all_at_once(drafting, [body | {"speculate": False} for body in bodies()])
    assert figures(drafting) == before
    assert told(answers) == told(expected("bundled"))
    mixed = [body | {"speculate": i % 2 == 0} for i, body in enumerate(bodies())]
    assert told(await all_at_once(drafting, mixed)) == told(expected("bundled"))
    assert figures(drafting) != before


async def test_a_stream_brings_several_tokens_a_message(plain, drafting):
    body = greedy_body(PROMPT, 64)
    (reference,) = await one_at_a_time(plain, [body])
    lengths = []
    async with http_client(drafting) as client:
        async for answer in stream(client, body):
            lengths.append(len(answer.token_ids))
    assert told([answer]) == told([reference])
    # Usually 2 to 4, what one step accepts; on a busy machine several steps' tokens come together.
    assert max(new - old for old, new in zip([0, *lengths], lengths, strict=False)) > 1


async def test_an_answer_ends_inside_accepted_drafts(plain, drafting):
    """At each of its tokens and at every third of its characters."""
    body = greedy_body(PROMPT, 40)
    (whole,) = await one_at_a_time(plain, [body])
    asked = [body | {"stop_token_ids": [token]} for token in sorted(set(whole.token_ids))]
    asked += [body | {"stop": [whole.text[i : i + 3]]} for i in range(0, len(whole.text) - 3, 3)]
    asked += [
        body | {"stop": [whole.text[i : i + 2]], "include_stop_str_in_output": True}
        for i in range(1, len(whole.text) - 2, 5)
    ]
    answers = await all_at_once(drafting, asked)
    assert told(answers) == told(await all_at_once(plain, asked))
    assert {answer.finish_reason for answer in answers} == {"stop"}
    drafting.wait_until(drafting.is_idle, "answers that ended early left nothing behind")


async def test_logprobs_and_echo_are_those_without_speculation(plain, drafting):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 3, "echo": True}
    scores = []
    for stack in (plain, drafting):
        reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60.0)
        assert reply.status_code == 200, reply.text
        scores.append(reply.json()["choices"][0])
    one, other = scores
    assert other["text"] == one["text"]
    for column in ("tokens", "text_offset"):
        assert other["logprobs"][column] == one["logprobs"][column]
    assert "".join(other["logprobs"]["tokens"]) == other["text"]
    for column in ("token_logprobs", "top_logprobs"):
        pairs = zip(one["logprobs"][column], other["logprobs"][column], strict=True)
        assert [mine for _, mine in pairs] == [
            pytest.approx(value, abs=1e-3) for value in one["logprobs"][column]
        ]


async def test_sampled_answers_are_the_same_tokens(plain, drafting):
    asked = [
        body | {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.3, "seed": i}
        for i, body in enumerate(bodies())
    ]
    assert told(await all_at_once(drafting, asked)) == told(await all_at_once(plain, asked))


async def test_answers_in_a_form_are_the_same_behind_a_handoff_and_with_drafts(plain, drafting):
    """The first token is chosen by the recompute of the prompt's last one, within the grammar."""
    parts = {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"enum": [1, 2]}},
    }
    schema = {"type": "object", "properties": parts, "required": ["name", "sizes"]}
    schema |= {"additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "part", "schema": schema}}
    bodies = [
        {"prompt": prompt, "max_tokens": 80, "seed": seed, "return_token_ids": True, "logprobs": 1}
        | {"temperature": seed % 2, "response_format": response_format}
        for seed, prompt in enumerate([PROMPT, [5], "{", PROMPT * 8])
    ]
    bodies += [greedy_body(PROMPT, 32), {"prompt": "x", "seed": 4, "guided_choice": ["yes", "no"]}]
    (alone, handed) = [await all_at_once(stack, bodies) for stack in (plain, drafting)]
    assert told(handed) == told(alone)
    assert [answer.finish_reason for answer in alone[3:]] == ["stop", "length", "stop"]
    for answer in alone[:4]:
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema)
    assert alone[5].text in ("yes", "no")


async def test_a_conversation_s_next_turn_goes_on_from_a_state_behind_drafts(plain):
    """Turns end by length and by a stop token, which may be an accepted draft that other drafts follow."""
    choose = random.Random(6)
    prompt = [choose.randrange(5, 900) for _ in range(61)]
    flags = (*speculating("mtp", 3, "none"), "--conversation-return")
    with running_stack("up", *FLAGS, *flags) as stack:
        covered = 0
        for turn in range(6):
            body = greedy_body(prompt, 17 + turn)
            (reference,) = await one_at_a_time(plain, [body])
            if turn % 2:
                body["stop_token_ids"] = [reference.token_ids[8 + turn]]
                (reference,) = await one_at_a_time(plain, [body])
            before = stack.stats("prefill-0")["prefill-0"].prefill_tokens
            (answer,) = await one_at_a_time(stack, [body])
            computed = stack.stats("prefill-0")["prefill-0"].prefill_tokens - before
            assert told([answer]) == told([reference])
            assert computed == len(prompt) - 1 - covered
            prompt = prompt + answer.token_ids
            covered = len(prompt) - 1  # the last token's state was never computed
            prompt = prompt + [choose.randrange(5, 900) for _ in range(9)]
        assert all(check_metrics(stack, 3))


@pytest.mark.in_clear  # its router has no certificate
@pytest.mark.exhaustive
async def test_a_decode_server_with_mtp_refuses_a_prefill_server_without(module_stacks, drafting):
    without = module_stacks("up", *FLAGS)
    addresses = ("--prefill", without.processes()["prefill-0"].address)
    addresses += ("--decode", drafting.processes()["decode-0"].address)
    with running_router(*addresses) as url:
        reply = httpx.post(f"{url}/v1/completions", json=greedy_body([17, 23, 42], 4), timeout=60.0)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (502, "handshake_refused"), reply.text
        assert "attn_layers" not in error["message"]
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            alone = await complete(client, greedy_body([17], 4))  # nothing is handed over
            assert len(alone.token_ids) == 4
    for stack in (without, drafting):
        stack.wait_until(stack.is_idle, "the refused prompt's lease has ended")
