"""The chart, its manifests and queries, in forms that tests read and run."""
