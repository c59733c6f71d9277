"""Twinfang beside vLLM, its pair and transformers, in one run."""
