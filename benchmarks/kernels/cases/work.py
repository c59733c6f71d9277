"""The least work of an op, however it is written: bytes read once, bytes written once, floating-point
operations, and what vectors need for functions of single elements.

Every function takes sizes in elements and the bytes of one element. Integers that locate rows (slots,
lengths) are a few bytes per row and left out, except if they are all there is. So are functions of what a
row has once per head.

A function of an element is counted in vector instructions of float32, without what guards its range:

| function | instructions |
|---|---|
| exponential | 10: n = round(x / ln 2) two, r = x - n ln 2 two, polynomial of degree 5 five, times 2^n one |
| reciprocal | 3: an estimate, and one step of Newton's method |
| silu | exponential, an addition, reciprocal, a product |
| a score's weight in softmax | exponential, a maximum, a difference, a sum |
| a logit of a draw | as in softmax; one random number for a row would do |
| a logit of the greedy choice | 3: a comparison, the index, a test for NaN and infinity |
| a byte of FP8 to float32 | 3: widen, shift, a product that corrects the exponent |
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32 = 4
EXPONENTIAL = 10
RECIPROCAL = 3
SILU = EXPONENTIAL + 1 + RECIPROCAL + 1
WEIGHT_OF_SCORE = EXPONENTIAL + 3
GREEDY_CHOICE = 3
FROM_FP8 = 3


@dataclass(frozen=True)
class Work:
    """The work of one call."""

    read: int
    """Bytes"""
    written: int
    """Bytes"""
    flops: int = 0
    """A multiply-add counts as two."""
    operations: int = 0
    """Instructions for functions of elements, times the elements. On a CPU each takes as long as a
    multiply-add. A GPU has other units for them than for products."""

    @property
    def moved(self) -> int:
        """Bytes"""
        return self.read + self.written


def selective_state_update(
    rows: int, positions: int, heads: int, head_dim: int, state_size: int, groups: int, element: int
) -> Work:
    """A row's float32 state is read once and written once per position; five operations per element and
    position."""
    state = rows * heads * head_dim * state_size
    tokens = rows * positions
    inputs = tokens * (heads * head_dim + heads + 2 * groups * state_size) * element
    return Work(
        read=state * FLOAT32 + inputs + 3 * heads * FLOAT32,
        written=positions * state * FLOAT32 + tokens * heads * head_dim * element,
        flops=5 * positions * state,
    )


def ssd_chunk_scan(
    tokens: int, heads: int, head_dim: int, state_size: int, groups: int, element: int
) -> Work:
    """One prompt from the zero state, which leaves its own.

    The recurrence needs five operations per token and state element. With ``head_dim`` half of
    ``state_size``, the GEMMs over chunks of ``state_size`` tokens need as many for each head.
    """
    state = heads * head_dim * state_size
    inputs = tokens * (heads * head_dim + heads + 2 * groups * state_size) * element
    return Work(
        read=inputs + 3 * heads * FLOAT32,
        written=state * FLOAT32 + tokens * heads * head_dim * element,
        flops=5 * tokens * state,
    )


def gated_delta_update(
    rows: int, positions: int, key_heads: int, key_dim: int, heads: int, value_dim: int, element: int
) -> Work:
    """A row's float32 state is read once and written once per position; seven operations per element and
    position: decay, the key's read, the write, the query's read."""
    state = rows * heads * value_dim * key_dim
    tokens = rows * positions
    inputs = tokens * (2 * key_heads * key_dim + heads * value_dim + 2 * heads) * element
    return Work(
        read=state * FLOAT32 + inputs + 2 * heads * FLOAT32,
        written=positions * state * FLOAT32 + tokens * heads * value_dim * element,
        flops=7 * positions * state,
    )


def gated_delta_chunk(
    tokens: int, key_heads: int, key_dim: int, heads: int, value_dim: int, element: int
) -> Work:
    """One prompt from the zero state, which leaves its own.

    The recurrence needs seven operations per token and state element. Chunks of 64 need six for their
    products with the state and, with keys and values of 128, four within the chunk, as GEMMs.
    """
    state = heads * value_dim * key_dim
    inputs = tokens * (2 * key_heads * key_dim + heads * value_dim + 2 * heads) * element
    return Work(
        read=inputs + 2 * heads * FLOAT32,
        written=state * FLOAT32 + tokens * heads * value_dim * element,
        flops=7 * tokens * state,
    )


def causal_conv1d_update(rows: int, positions: int, channels: int, width: int, element: int) -> Work:
    """A row's last ``width - 1`` inputs are read once and written once per position; filter and bias are read
    once."""
    state, tokens = rows * channels * (width - 1), rows * positions * channels
    return Work(
        read=(state + tokens + channels * (width + 1)) * element,
        written=(positions * state + tokens) * element,
        flops=2 * tokens * width,
        operations=SILU * tokens,
    )


def causal_conv1d(tokens: int, channels: int, width: int, element: int) -> Work:
    """One prompt from zeros, which leaves its last ``width - 1`` inputs."""
    return Work(
        read=(tokens + width + 1) * channels * element,
        written=(tokens + width - 1) * channels * element,
        flops=2 * tokens * channels * width,
        operations=SILU * tokens * channels,
    )


def paged_attention(
    rows: int, queries: int, seq_len: int, heads: int, kv_heads: int, head_dim: int, element: int
) -> Work:
    """``queries`` new tokens per row, each of which attends to itself and all before it; ``seq_len`` includes
    them."""
    pairs = rows * (queries * seq_len - queries * (queries - 1) // 2)
    out = rows * queries * heads * head_dim * element
    kv = 2 * rows * seq_len * kv_heads * head_dim * element
    return Work(
        read=out + kv,
        written=out,
        flops=4 * pairs * heads * head_dim,
        operations=WEIGHT_OF_SCORE * pairs * heads,
    )


def store_kv(tokens: int, kv_heads: int, head_dim: int, element: int) -> Work:
    kv = 2 * tokens * kv_heads * head_dim * element
    return Work(read=kv + 8 * tokens, written=kv)


def rms_norm(rows: int, hidden: int, element: int) -> Work:
    return Work((rows + 1) * hidden * element, rows * hidden * element, 4 * rows * hidden)


def add_rms_norm(rows: int, hidden: int, element: int) -> Work:
    """Reads two summands; writes sum and norm."""
    return Work((2 * rows + 1) * hidden * element, 2 * rows * hidden * element, 5 * rows * hidden)


def gated_rms_norm(rows: int, width: int, element: int) -> Work:
    """Reads output and gate of a mixer; writes one result."""
    return Work(
        read=(2 * rows + 1) * width * element,
        written=rows * width * element,
        flops=5 * rows * width,
        operations=SILU * rows * width,
    )


def linear(rows: int, inputs: int, outputs: int, element: int) -> Work:
    return Work(
        read=(rows + outputs) * inputs * element,
        written=rows * outputs * element,
        flops=2 * rows * inputs * outputs,
    )


def quantized_linear(rows: int, inputs: int, outputs: int, element: int) -> Work:
    """A weight of one byte, with a scale for 128 inputs of 128 outputs."""
    scales = -(-outputs // 128) * -(-inputs // 128) * FLOAT32
    return Work(
        read=rows * inputs * element + outputs * inputs + scales,
        written=rows * outputs * element,
        flops=2 * rows * inputs * outputs,
        operations=FROM_FP8 * inputs * outputs,
    )


def experts(
    rows: int, num_experts: int, per_token: int, hidden: int, intermediate: int, element: int
) -> Work:
    """Two matrices of every expert that has a token, with tokens spread as evenly as possible."""
    touched = min(num_experts, rows * per_token)
    return Work(
        read=(touched * 2 * intermediate + rows) * hidden * element + rows * per_token * FLOAT32,
        written=rows * hidden * element,
        flops=4 * rows * per_token * hidden * intermediate,
    )


def sampling(rows: int, positions: int, vocab_size: int, *, greedy: bool) -> Work:
    """Reads float32 logits once; writes a token each, 8 bytes."""
    logits = rows * positions * vocab_size
    return Work(
        read=logits * FLOAT32,
        written=rows * positions * 8,
        operations=logits * (GREEDY_CHOICE if greedy else WEIGHT_OF_SCORE),
    )


def accept_drafts(rows: int, positions: int, stop_ids: int) -> Work:
    """Integers: the sampled, drafted and allowed tokens; the state that moves on and the results for the
    host."""
    read = rows * (8 + 8 + positions * (8 + 1 + 4 + 8) + 4 * 4 + 1 + 8 * stop_ids)
    written = rows * (8 * positions + 3 * 4 + 1 + 4 + 8 * (positions + 3))
    return Work(read, written)
