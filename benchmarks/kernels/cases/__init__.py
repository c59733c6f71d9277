"""One case a kernel: its operands, its work, its peers."""
