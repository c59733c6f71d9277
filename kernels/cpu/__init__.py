"""What kernels on CPUs are made with: numba, vectors, threads, recorded graphs, host memory."""
