"""Who computes next, with which rows, blocks and slots. Pure: no tensors."""
