"""`twinfang plan`: what fits into a GPU's memory, and how fast that would be."""
