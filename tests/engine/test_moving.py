"""A request continues where another server stopped, with its answer so far, its seed and its penalties."""

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from testing.engines.sanitizing import SANITIZE
from wire.messages.sampling_params import SamplingParams, Thinking

PROMPT = [40 + i % 23 for i in range(37)]
PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "thinking": {"temperature": 0.9, "thinking": Thinking((300,), (301, 302), is_open=True, budget=6)},
    "penalised": {"temperature": 0.7, "frequency_penalty": 0.8, "repetition_penalty": 1.2, "min_tokens": 20},
}
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=[0, 3], ids=["k0", "k3"])
def engine(request, bundled_model):
    return Engine(
        EngineConfig(
            bundled_model,
            "both",
            device="cpu",
            max_num_seqs=4,
            max_batch_tokens=32,
            num_speculative=request.param,
            state_block_size=16,
            cache_memory_bytes=64 << 20,
            sanitize=SANITIZE,
        )
    )


def ask(name, answered=(), **params):
    return Request(
        name,
        [*PROMPT, *answered],
        SamplingParams(max_tokens=NUM_TOKENS, **params),
        seed=5,
        num_answered=len(answered),
    )


def outputs_of(engine, until=None):
    """All outputs until nothing is left to do, or ``until`` so many tokens have come."""
    outputs, num_tokens = [], 0
    while until is None or num_tokens < until:
        step = engine.step()
        outputs += step.outputs
        num_tokens += sum(len(output.token_ids) for output in step.outputs)
        if step.did_nothing:
            break
    return outputs


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("answered", [1, 7, NUM_TOKENS - 1])
def test_an_answer_goes_on_from_any_of_its_tokens(engine, kind, answered):
    whole = ask("whole", **PARAMS[kind])
    engine.add(whole)
    outputs_of(engine)
    rest = ask("rest", whole.tokens[len(PROMPT) : len(PROMPT) + answered], **PARAMS[kind])
    engine.add(rest)
    outputs = outputs_of(engine)
    assert rest.tokens == whole.tokens
    assert [token for output in outputs for token in output.token_ids] == whole.tokens[
        len(PROMPT) + answered :
    ]
    assert rest.finish_reason == whole.finish_reason


def test_all_requests_are_let_go_and_what_decodes_is_held(engine):
    decoding, queued = ask("decoding", temperature=0), [ask(f"q{i}", temperature=0) for i in range(6)]
    engine.add(decoding)
    said = outputs_of(engine, until=5)
    for request in queued:
        engine.add(request)
    engine.move_all()
    result = engine.step()
    outputs = [*said, *result.outputs]
    moved = [output for output in outputs if output.finish_reason == "moved"]
    assert [output.request_id for output in moved] == ["decoding", *(f"q{i}" for i in range(6))]
    assert [request.request_id for request in result.kept] == ["decoding"]
    tokens = [t for output in outputs if output.request_id == "decoding" for t in output.token_ids]
    assert tokens == decoding.tokens[len(PROMPT) :], "what was under way is said before it goes"
    assert decoding.num_computed == len(decoding.tokens) - 1
    assert outputs_of(engine) == []
    engine.release("decoding")
    owned = engine.scheduler.owned
    owned.cache.clear()
    assert owned.blocks.num_free == owned.blocks.capacity
    assert owned.slots.num_free == owned.slots.capacity
