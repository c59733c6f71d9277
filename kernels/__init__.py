"""Operators of the models, one module each: reference, Triton kernel, CPU path (here or in `<op>_cpu.py`)."""
