"""The common parts of Triton kernels (compilation, tiles, strides), and a thread's current GPU."""
