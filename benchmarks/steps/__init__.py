"""One step: how its time is spent, and the machine's limits."""
