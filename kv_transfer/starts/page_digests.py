"""Digests of pages of host memory, of the lending server's and of what a reader has received."""

from __future__ import annotations

import torch

from kernels.digests.unit_digest import PoolDigests

WORD_BYTES = 8


def page_digests(pages: torch.Tensor, page_bytes: int) -> PoolDigests | None:
    """Returns what digests whole pages of ``pages``, uint8 on the host, by index from 0.

    None if a page is no whole number of words.
    """
    num_pages = len(pages) // page_bytes
    if page_bytes % WORD_BYTES or not num_pages:
        return None
    words = pages[: num_pages * page_bytes].view(torch.int64)
    return PoolDigests(words.view(num_pages, page_bytes // WORD_BYTES))
