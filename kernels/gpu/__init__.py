"""What Triton kernels share: compilation, tiles for a device, strides."""
