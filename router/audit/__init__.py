"""The audit log: who did what, in a file whose lines are chained by their hashes."""
