"""What one hostile client does to another: a victim is measured while somebody attacks the same stack."""
