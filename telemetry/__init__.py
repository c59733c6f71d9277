"""What processes report about themselves: metrics, probes, traces. No torch."""
