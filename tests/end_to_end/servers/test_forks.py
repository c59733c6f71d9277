"""Eight choices of one prompt over real processes: the prompt is computed and transferred once."""

import random

import httpx

from testing.fleets.clients import greedy_body


def test_eight_choices_take_one_prefill_and_one_transfer(stacks):
    stack = stacks("up", "--max-num-seqs", "16")
    choose = random.Random(11)
    body = greedy_body([choose.randrange(5, 900) for _ in range(201)], 12, temperature=0.9, seed=3)
    counts = [stack.stats()]

    def ask(**fields):
        reply = httpx.post(f"{stack.url}/v1/completions", json=body | fields, timeout=60.0).json()
        counts.append(stack.stats())
        return [choice["token_ids"] for choice in reply["choices"]]

    together = ask(n=8, cache_salt="together")
    alone = [ask(seed=3 + i, cache_salt=f"alone {i}")[0] for i in range(8)]
    assert together == alone

    def grown(name, server, i):
        return getattr(counts[i + 1][server], name) - getattr(counts[i][server], name)

    assert grown("prefill_tokens", "prefill-0", 0) == grown("prefill_tokens", "prefill-0", 1) == 200
    assert grown("transfer_bytes", "decode-0", 0) == grown("transfer_bytes", "decode-0", 1) > 0
