"""What `make gpu` runs: stages of tests and benchmarks, and tiles of kernels."""
