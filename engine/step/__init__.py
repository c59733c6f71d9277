"""From a plan to launched kernels: batches, row state, graphs, drafts, and what comes back."""
