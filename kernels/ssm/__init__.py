"""Mamba-2: convolution, scan of a prompt's chunks, and one step of decode rows."""
