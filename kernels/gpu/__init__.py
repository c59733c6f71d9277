"""The common parts of Triton kernels: compilation, tiles for a device, strides."""
