"""The prefill service: computes prompts up to token N-1 and leases their blocks and state."""
