"""One case for each kernel: its operands, its work, its peers."""
