"""Operands of kernels, and ways to compile, interpret and compare them."""
