"""The prefill side: memory lent until it was read, and the epochs that say it was not reused."""
