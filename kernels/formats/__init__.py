"""Number formats of caches and weights, and the rounding to them."""
