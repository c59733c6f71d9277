"""Compares Twinfang with vLLM, a pair of vLLM servers and transformers, in one run."""
