"""From a step's plan to launched kernels and their results: batches, row state, graphs and drafts."""
