"""The prefill side: memory lent until it is read, given back or expired. Epochs tell readers of the end."""
