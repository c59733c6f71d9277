"""The chart, its manifests and queries, as tests read and run them."""
