"""What `make gpu` runs: three calls made of stages, checks of whole steps, handoffs in GPU memory, tiles of
kernels."""
