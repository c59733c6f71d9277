import numpy as np
import pytest
import torch

from kernels.sampling import token_mask as module
from kernels.sampling.token_mask import mask_tokens, mask_tokens_reference, num_words


def masked(target, *operands):
    return module._launch(*operands) if target.name == "triton" else mask_tokens(*operands)


@pytest.mark.parametrize(
    ("num_rows", "num_positions", "mask_positions", "vocab_size"),
    [(1, 1, 1, 32), (3, 2, 4, 1000), (2, 3, 3, 2077), (4, 1, 3, 31)],
)
def test_just_the_tokens_whose_bits_are_set_are_left(
    target, num_rows, num_positions, mask_positions, vocab_size
):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, num_positions, vocab_size, generator=generator)
    words = (num_rows + 2, mask_positions, num_words(vocab_size))
    masks = torch.randint(-(1 << 31), 1 << 31, words, generator=generator).to(torch.int32)
    masks[-1] = -1
    rows = torch.randperm(num_rows + 2, generator=generator)[:num_rows]
    rows[0] = num_rows + 1  # a row without a grammar
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=-1, bitorder="little")[..., :vocab_size]
    expected = logits.where(torch.from_numpy(bits)[rows, :num_positions] == 1, -torch.inf)
    before = logits.clone()
    operands = [tensor.to(target.device) for tensor in (logits, rows, masks)]

    assert torch.equal(masked(target, *operands).cpu(), expected)
    assert torch.equal(mask_tokens_reference(logits, rows, masks), expected)
    assert torch.equal(operands[0].cpu(), before)
    assert torch.equal(expected[0], logits[0])


def test_damage_shows_whether_or_not_its_token_is_allowed(target):
    logits = torch.tensor([[[torch.nan, 1.0, torch.inf, -torch.inf, 2.0]]])
    masks = torch.tensor([[[0b00010]]], dtype=torch.int32)
    expected = torch.tensor([[[torch.nan, 1.0, torch.inf, -torch.inf, -torch.inf]]])

    operands = [tensor.to(target.device) for tensor in (logits, torch.tensor([0]), masks)]
    torch.testing.assert_close(masked(target, *operands).cpu(), expected, equal_nan=True, rtol=0, atol=0)
