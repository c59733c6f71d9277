"""Operators of the models, a module each: reference, Triton kernel, CPU path (here or in `<op>_cpu.py`)."""
