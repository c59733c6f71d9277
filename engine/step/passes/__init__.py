"""The model's pass: of decode rows recorded on a CPU, of a short prompt captured on a GPU."""
