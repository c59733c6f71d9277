"""The prefill server's side of routers' streams."""
