"""Random lives of requests over the real scheduler, caches and tiers, with a simulated device and files."""
