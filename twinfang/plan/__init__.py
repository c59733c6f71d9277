"""`twinfang plan`: computes what fits into a GPU's memory, and how fast the servers would be."""
