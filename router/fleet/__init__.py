"""The servers: which there are, which of them serve a model, what is known of all."""
