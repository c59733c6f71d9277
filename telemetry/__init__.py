"""What processes report about themselves: metrics, probes, traces. Nothing here imports torch."""
