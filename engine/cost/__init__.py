"""What a step costs in bytes, operations and seconds: for `twinfang plan` and the autoscaler."""
