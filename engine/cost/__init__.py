"""The cost of a step in bytes, operations and seconds, for `twinfang plan` and the autoscaler."""
