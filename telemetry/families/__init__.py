"""Metric families: of the handoff and of speculation, on servers and routers, and under vLLM's names."""
