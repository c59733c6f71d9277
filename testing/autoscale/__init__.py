"""Code that tests of the autoscaler share."""
