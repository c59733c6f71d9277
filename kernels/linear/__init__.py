"""Matrix products, packed and quantized."""
