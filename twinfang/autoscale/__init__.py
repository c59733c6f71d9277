"""``twinfang autoscale``: computes the sizes of both pools from metrics and objectives."""
