"""Remove from logits the tokens that a bit mask forbids.

Row r of the step is row ``q = rows[r]`` of the masks; token v has bit ``v % 32`` of word ``v // 32``:

    masked[r, t, v] = logits[r, t, v]    where the bit of v in masks[q, t] is 1
                    = -inf               elsewhere

NaN and plus infinity stay, whether or not the token is allowed, since they show that the row is damaged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.triton_jit import tl, triton, triton_jit

WORD_BITS = 32
_BLOCK = 1024


def num_words(vocab_size: int) -> int:
    """Return how many words a mask of ``vocab_size`` tokens has. Bits after the last token are ignored."""
    return -(-vocab_size // WORD_BITS)


def mask_tokens(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """Return the masked logits, a new tensor. Does not wait for the device.

    ``logits`` ``[R, T, V]`` float32, contiguous: R rows, T positions, V tokens. ``rows`` ``[R]`` int64.
    ``masks`` ``[N, P, W]`` int32, contiguous: N masks of ``P >= T`` positions and W words.
    """
    if logits.is_cuda:
        return _launch(logits, rows, masks)
    return mask_tokens_reference(logits, rows, masks)


def mask_tokens_reference(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """Reference of :func:`mask_tokens`: all bits at once."""
    num_rows, num_positions, vocab_size = logits.shape
    words = masks[rows, :num_positions, :, None]
    bits = (words >> torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)) & 1
    is_allowed = bits.view(num_rows, num_positions, -1)[:, :, :vocab_size] == 1
    return torch.where(is_allowed | logits.isnan() | logits.isposinf(), logits, -torch.inf)


# One program per 1,024 tokens of one position: 32 words, each read for 32 neighbouring tokens at once.
@triton_jit
def _mask_tokens_kernel(
    logits_ptr,
    rows_ptr,
    masks_ptr,
    masked_ptr,
    num_positions,
    mask_positions,
    num_words,
    vocab_size,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + item // num_positions)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocab_size
    start = (row * mask_positions + item % num_positions) * num_words
    word = tl.load(masks_ptr + start + v // 32, mask=inside, other=0)
    logit = tl.load(logits_ptr + item * vocab_size + v, mask=inside, other=0.0)
    forbidden = ((word >> (v % 32)) & 1) == 0
    is_damage = (logit != logit) | (logit == float("inf"))
    masked = tl.where(forbidden & (is_damage == 0), float("-inf"), logit)
    tl.store(masked_ptr + item * vocab_size + v, masked, mask=inside)


def _launch(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    num_rows, num_positions, vocab_size = logits.shape
    masked = torch.empty_like(logits)
    _mask_tokens_kernel[(num_rows * num_positions, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        rows,
        masks,
        masked,
        num_positions,
        masks.shape[1],
        masks.shape[2],
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return masked
