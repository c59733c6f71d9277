"""Log-probabilities of tokens, their ranks, and the best tokens with theirs, from one read of the logits.

    logprob(v) = x(v) - log(sum of exp x)
    rank(v)    = 1 + number of tokens with a larger logit

Of ``n`` best tokens, larger logits come first, and of equal ones the lower token id (on a GPU: any order).
m is the number of rows, V of tokens in the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.gpu.triton_jit import tl, triton_jit
from kernels.sampling.token_logprobs_cpu import logprobs_of_rows

_BLOCK = 2048
_TOKENS_A_THREAD = 1 << 17


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return numbers ``[m, 1 + num_top]`` float32 and integers ``[m, 2 + num_top]`` int64.

    Numbers are the log-probability of the row's token in ``token_ids`` ``[m]`` int64, then those of the best
    tokens. Integers are the token, its rank, then the best tokens. ``logits`` is ``[m, V]`` float32, and
    ``num_top`` is at most V. Rows with NaN or plus infinity give meaningless results. Does not wait for the
    device.
    """
    logits, token_ids = logits.contiguous(), token_ids.contiguous()
    if logits.is_cuda:
        return _launch(logits, token_ids, num_top)
    num_rows, vocab_size = logits.shape
    numbers = torch.empty((num_rows, 1 + num_top))
    integers = torch.empty((num_rows, 2 + num_top), dtype=torch.int64)
    logprobs_of_rows.parallel_for(
        num_rows,
        max(1, _TOKENS_A_THREAD // vocab_size),
        FlatArray(logits),
        token_ids,
        numbers,
        integers,
        vocab_size,
    )
    return numbers, integers


def token_logprobs_reference(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Reference of :func:`token_logprobs`, in the dtype of ``logits``."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = token_ids[:, None]
    ranks = (logits > logits.gather(1, chosen)).sum(dim=-1, keepdim=True) + 1
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    integers = torch.cat((chosen, ranks, best), dim=1)
    return logprobs.gather(1, torch.cat((chosen, best), dim=1)), integers


# One program per row. A lane keeps the largest of its logits and the sum of exponentials relative to it.
@triton_jit
def _logprobs_kernel(
    logits_ptr, chosen_ptr, logprobs_ptr, ranks_ptr, log_sums_ptr, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * vocab_size
    chosen = tl.load(chosen_ptr + row)
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    num_better = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < vocab_size, other=float("-inf"))
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        num_better += (x > chosen).to(tl.int32)
    highest = tl.max(top)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest)))
    tl.store(logprobs_ptr + row, chosen - log_sum)
    tl.store(ranks_ptr + row, (tl.sum(num_better) + 1).to(tl.int64))
    tl.store(log_sums_ptr + row, log_sum)


def _launch(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    logprobs, log_sums = logits.new_empty((num_rows, 1)), logits.new_empty((num_rows, 1))
    ranks = torch.empty((num_rows, 1), dtype=torch.int64, device=logits.device)
    if num_rows > 0:
        # Gathered here: token ids may be a view at any address, for which Triton would compile again.
        operands = logits, logits.gather(1, token_ids[:, None]), logprobs, ranks, log_sums
        _logprobs_kernel[(num_rows,)](*operands, vocab_size, BLOCK=_BLOCK, num_warps=8)
    values, best = logits.topk(num_top, dim=-1)
    numbers = torch.cat((logprobs, values - log_sums), dim=1)
    return numbers, torch.cat((token_ids[:, None], ranks, best), dim=1)
