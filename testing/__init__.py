"""Code that tests and benchmarks share: fleets, checkpoints, oracles, conditions. No test is here."""
