"""Matrix products with packed and quantized weights."""
