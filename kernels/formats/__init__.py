"""Number formats of caches and weights, and how numbers are rounded to them."""
