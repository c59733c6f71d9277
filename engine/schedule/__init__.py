"""Decides which requests compute next, and with which rows, blocks and slots. Pure: no tensors."""
