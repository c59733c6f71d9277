"""A conformance suite of handoffs, for any OpenAI endpoint with a prefill and a decode server behind it."""
