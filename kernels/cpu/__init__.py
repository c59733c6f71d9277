"""The tools for kernels on CPUs: numba, vectors, threads, recorded graphs, host memory."""
