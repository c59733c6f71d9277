"""OpenAI-compatible front end: HTTP to clients, gRPC to prefill and decode servers. No torch."""
