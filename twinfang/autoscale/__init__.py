"""``twinfang autoscale``: from metrics and objectives to the sizes of both pools."""
