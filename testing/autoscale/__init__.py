"""What tests of the autoscaler share."""
