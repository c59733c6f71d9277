"""A real control plane, and the chart's programs that run against it."""
