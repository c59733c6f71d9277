"""Turns a step's plan into launched kernels and reads their results: batches, row state, graphs, drafts."""
