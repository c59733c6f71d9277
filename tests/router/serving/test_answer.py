import codecs
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.serving.answer import Answer, Delta
from testing.router.tokenizers import EOS, byte_level
from wire.messages.generation import RequestOutput
from wire.messages.sampling_params import SamplingParams

WORDS = byte_level()


def run(token_ids: list[int], cuts: list[int], *, ends: bool, **options) -> tuple[Delta, int]:
    """The sum of all deltas of an answer whose tokens come in steps cut at ``cuts``."""
    min_tokens = options.pop("min_tokens", 0)
    params = SamplingParams(max_tokens=1000, min_tokens=min_tokens)
    answer = Answer(WORDS, params, prompt_token_ids=(), eos_token_ids=frozenset({EOS}), **options)
    total = Delta()
    edges = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        is_last = end == len(token_ids)
        total += answer.push(
            RequestOutput(
                "a",
                tuple(token_ids[start:end]),
                finish_reason=("stop" if ends else "length") if is_last else None,
                stop_token_id=token_ids[-1] if is_last and ends else None,
            )
        )
        if answer.finish_reason is not None:
            break
    return total, answer.num_tokens


tokens = st.one_of(
    st.lists(st.integers(0, 410), min_size=1, max_size=60),
    st.text(alphabet="ab é😀", min_size=1, max_size=30).map(WORDS.encode_now),
)
stops = st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=4), max_size=3)


@given(
    tokens,
    stops,
    st.lists(st.integers(0, 100), max_size=10),
    st.integers(0, 10),
    st.booleans(),
    st.booleans(),
)
def test_an_answer_does_not_depend_on_how_many_tokens_come_in_a_step(ids, stop, cuts, least, ends, include):
    options = {"stop": stop, "min_tokens": least, "include_stop_str_in_output": include}
    one_by_one = run(ids, list(range(len(ids))), ends=ends, **options)
    assert run(ids, cuts, ends=ends, **options) == one_by_one


@given(tokens, st.lists(st.integers(0, 100), max_size=10))
def test_without_stop_strings_the_text_is_that_of_the_tokens(ids, cuts):
    """All of them count, but a code point that the last ones begin is not shown."""
    total, num_tokens = run(ids, cuts, ends=False)
    data = b"".join(bytes(WORDS.token_bytes(i)) for i in ids if WORDS.has_text(i, skip_special_tokens=True))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    assert (total.text, total.token_ids, num_tokens) == (decoder.decode(data), ids, len(ids))
    begun, _ = decoder.getstate()
    assert WORDS.decode(ids) == total.text + "\ufffd" * bool(begun)
    assert total.finish_reason == "length"
    assert total.text_offsets == sorted(total.text_offsets)


def test_end_of_sequence_has_no_stop_reason_and_no_text():
    total, num_tokens = run([*WORDS.encode_now("hello"), EOS], [], ends=True, skip_special_tokens=False)
    assert (total.text, total.finish_reason, total.stop_reason) == ("hello", "stop", None)
    assert num_tokens == len(WORDS.encode_now("hello")) + 1
