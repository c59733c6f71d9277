"""The prefill service: runs prompts up to token N-1 and lends their blocks and state."""
