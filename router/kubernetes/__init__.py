"""Discovery of servers that are pods. It watches the Kubernetes API, and adds and removes servers as an
operator would do it."""
