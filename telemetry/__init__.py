"""What processes tell of themselves: figures in Prometheus' form, probes, traces. No torch."""
